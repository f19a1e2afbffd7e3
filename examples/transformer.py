"""A Transformer of one's own, trained by PipeDream-2BW.

    OMP_NUM_THREADS=1 python examples/transformer.py       # both stages in this process
    torchrun --nproc-per-node 2 examples/transformer.py    # a process per stage, and the same numbers, bit for bit

The trained weights go back into the model that was not cut, and to transformer.pt.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock

VOCABULARY, LENGTH, WIDTH, LAYERS = 32, 8, 16, 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight


class Layer(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, nhead=2, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_loader() -> DataLoader:  # the next token is three times this one, plus one
    tokens = torch.randint(VOCABULARY, (480, 1), generator=torch.Generator().manual_seed(0))
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, (3 * tokens[:, -1:] + 1) % VOCABULARY], 1)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=16)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> Transformer:
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model on every rank
    model, loader = Transformer(), make_loader()
    pipeline = penstock.Pipeline(
        model,
        method="2bw",
        stages=2,
        microbatches=4,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        example=next(iter(loader))[0],  # inputs of a batch, on which the model is run once to be divided
        group=dist.group.WORLD,  # None without torchrun
    )
    for report in pipeline.run(loader):
        if report.loss is not None:  # known where the last stage is
            print(f"batch {report.batch}: loss {report.loss:.4f}")
    weights = pipeline.full_state_dict()  # all ranks call it, and rank 0 gets it
    if weights:
        model.load_state_dict(weights)
        torch.save(weights, "transformer.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
