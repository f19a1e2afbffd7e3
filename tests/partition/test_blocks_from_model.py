"""A whole model in place of blocks is trained to the bits of plain torch, under its own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError
from support.pool import Pool

VOCABULARY, LENGTH, M = 16, 6, 2


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (3, 2 * M, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def make_adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


def make_pipeline(model: nn.Module, stages: int, method: str = "1f1b", **more: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        model, method, stages=stages, microbatches=M, **{"loss": loss, "optimizer": make_adamw} | more
    )


def make_sgd(named: Any) -> torch.optim.Optimizer:
    """For what is compared to rounding, which AdamW makes large where a gradient is nearly zero."""
    return torch.optim.SGD(named, lr=0.1)


def train_plain(
    model: nn.Module, batches: Any, loss: Any, logits: Any = lambda x: x, optimizer: Any = make_adamw
) -> list[float]:
    optimizer, losses = optimizer(model.named_parameters()), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        sums = []
        for x, y in zip(inputs.tensor_split(M), targets.tensor_split(M), strict=True):
            sums.append(loss(logits(model(x)), y) * len(x))
            sums[-1].backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(inputs)
        optimizer.step()
        losses.append(sum(part.item() for part in sums) / len(inputs))
    return losses


class TwoEmbeddings(nn.Module):
    """As many people write their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_emb, self.pos_emb = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


class Nested(nn.Module):
    """A model inside, with one embedding, and a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed = nn.Embedding(VOCABULARY, 8)
        self.model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.lm_head = nn.Linear(8, VOCABULARY, bias=False)
        self.lm_head.weight = self.model.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed(tokens)  # type: ignore[operator]
        for layer in self.model.layers:  # type: ignore[union-attr]
            x = layer(x)
        found: Tensor = self.lm_head(x)
        return found


class Masked(nn.Module):
    """A mask that is made once goes to all layers; a bare parameter; a head that reads the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok, self.pos = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.start = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.norm, self.unused = nn.LayerNorm(8), nn.Linear(2, 2)
        self.scale = 0.5

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tok(tokens) * self.scale + self.pos(torch.arange(length)) + self.start
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x) @ self.tok.weight.T  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.relu(self.bn(self.conv(x)) + x)
        return found


class ResNet(nn.Module):
    """In torchvision's form: layers in a Sequential, and a module without weights that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1, self.layer2 = nn.Sequential(Residual(), Residual()), nn.Sequential(Residual())
        self.tanh, self.avgpool, self.fc = nn.Tanh(), nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(4, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tanh(self.layer2(self.tanh(self.layer1(self.relu(self.bn1(self.conv1(x)))))))
        found: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return found


def images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2 * M, 3, 8, 8, generator=generator), torch.arange(2 * M)) for _ in range(3)]


MODELS: dict[type[nn.Module], tuple[Any, Any, list[str]]] = {
    TwoEmbeddings: (
        batches, loss,
        ["tok_emb..pos_emb", "drop", *(f"layers.{i}.{k}" for i in range(3) for k in range(2)), "norm", "head"],
    ),
    Nested: (batches, loss, ["model.embed", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"]),
    Masked: (batches, loss, ["tok..pos", "layers.0", "layers.1", "layers.2", "norm", "matmul"]),
    ResNet: (
        images, F.cross_entropy,
        ["conv1", "bn1..relu", "layer1.0", "layer1.1", "tanh", "layer2.0", "tanh_2", "avgpool", "flatten", "fc"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_whole_model_trains_to_the_bits_of_plain_torch(kind: type[nn.Module], stages: int) -> None:
    """In place, in one process; what plain torch does not train stays as it is.

    Each of the stages that share a parameter adds up its own gradients first, so there it is to rounding.
    """
    close = {"rtol": 1e-5, "atol": 1e-6} if stages > 1 and kind in (Nested, Masked) else {"rtol": 0, "atol": 0}
    data, loss, names = MODELS[kind]
    plain, model = kind(), kind()
    make = make_sgd if kind in (Nested, Masked) else make_adamw
    losses = train_plain(plain, data(), loss, optimizer=make)
    pipeline = make_pipeline(model, stages, loss=loss, optimizer=make)
    assert [report.loss for report in pipeline.run(data())] == pytest.approx(losses, rel=close["rtol"], abs=0)
    assert [name for part in pipeline.parts for name in part] == names
    found, wanted = pipeline.full_state_dict(), plain.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, **close)
        assert torch.equal(found[name], model.state_dict()[name]), name
    kind().load_state_dict(found)


def test_optimizers_and_hooks_see_the_names_of_the_model() -> None:
    """A parameter that two stages use has a name of its own in the second one."""
    model, given, updated = Masked(), [], set()

    def optimizer(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        given.extend(name for name, _ in pairs)
        return make_adamw(pairs)

    pipeline = make_pipeline(model, 3, optimizer=optimizer)
    pipeline.on_update(lambda update, weights: updated.update(weights))
    list(pipeline.run(batches()))
    used = {name for name, _ in model.named_parameters() if not name.startswith("unused.")}
    assert set(given) == updated == used | {"matmul.tok.weight"}
    assert len(given) == len(used) + 1


def test_a_state_goes_into_a_pipeline_of_a_whole_model() -> None:
    weights = Masked().state_dict()
    pipeline = make_pipeline(Masked(), 3)
    first = [report.loss for report in pipeline.run(batches())]
    pipeline.load_state_dict(weights)
    again = make_pipeline(pipeline._given[0], 3)
    assert [report.loss for report in again.run(batches())] == first
    with pytest.raises(ConfigError, match='Unexpected key.*"other.weight"'):
        pipeline.load_state_dict({**weights, "other.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match='Missing key.*"pos.weight"'):
        pipeline.load_state_dict({name: tensor for name, tensor in weights.items() if name != "pos.weight"})


@pytest.mark.parametrize("stages", [2, 3])
def test_a_checkpoint_of_a_whole_model_goes_on_under_other_stages(tmp_path: Any, stages: int) -> None:
    whole = [report.loss for report in make_pipeline(Masked(), 2, "2bw").run(batches())]
    pipeline = make_pipeline(Masked(), 3, "2bw")
    first = [report.loss for report in pipeline.run(batches()[:1])]
    penstock.Checkpoints(pipeline, tmp_path).save()
    resumed = make_pipeline(Masked(), stages, "2bw")
    penstock.Checkpoints(resumed, tmp_path).load()
    assert first + [report.loss for report in resumed.run(batches()[1:])] == whole


def in_processes(group: dist.ProcessGroup) -> tuple[list[float | None], dict[str, Tensor]]:
    model = Masked()
    pipeline = make_pipeline(model, 2, group=penstock.Group(group, 20.0))
    losses = [report.loss for report in pipeline.run(batches())]
    with pytest.raises(ConfigError, match="is trained by another process"):
        model.state_dict()
    sent = [dict(pipeline.full_state_dict())]
    dist.broadcast_object_list(sent, src=0, group=group)
    model.load_state_dict(sent[0])
    assert all(torch.equal(tensor, sent[0][name]) for name, tensor in model.state_dict().items())
    losses += [report.loss for report in pipeline.run(batches())]
    sent = [dict(pipeline.full_state_dict())]
    dist.broadcast_object_list(sent, src=0, group=group)
    pipeline.load_state_dict(sent[0])
    losses += [report.loss for report in pipeline.run(batches())]
    return losses, dict(pipeline.full_state_dict())


def test_a_whole_model_between_processes_trains_to_the_bits_of_one(pool: Pool) -> None:
    """A mask travels with the activations; weights go into the model, and into the pipeline, on every rank."""
    (_, found), (losses, _) = pool.submit(in_processes, ranks=2)
    alone = make_pipeline(Masked(), 2)
    assert losses == [report.loss for _ in range(3) for report in alone.run(batches())]
    wanted = alone.full_state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_model_that_was_changed_between_two_runs_is_refused() -> None:
    """What the forward of the model itself reads was read when the pipeline was made."""
    model = Masked()
    pipeline = make_pipeline(model, 2)
    list(pipeline.run(batches()))
    model.scale = 0.25
    with pytest.raises(ConfigError, match="does something else in block 'tok..pos' since the pipeline was made"):
        pipeline.run(batches())
    model.scale = 0.5
    list(pipeline.run(batches()))
    model.norm = nn.LayerNorm(8)
    with pytest.raises(ConfigError, match="norm is another object since the pipeline was made"):
        pipeline.run(batches())
