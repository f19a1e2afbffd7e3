"""A GPT-2 of `transformers`, trained in stages and put together again: `python examples/gpt2.py`.

Also under `torchrun --nproc-per-node 2`. The model is divided as it is, by an example of its inputs; the loss gets what
it returns. The trained weights go back into it. The embedding and the head hold one parameter; each of their stages has
a copy of it, and the copies stay equal. (`pip install penstock[hf]`; nothing is downloaded, as the model begins with
random weights.)
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

import penstock

VOCABULARY, LENGTH = 32, 8


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends, drops = {"bos_token_id": 0, "eos_token_id": 0}, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, **drops, use_cache=False))


def make_loader() -> DataLoader:  # the next token is three times this one, plus one
    tokens = torch.randint(VOCABULARY, (320, 1), generator=torch.Generator().manual_seed(0))
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, (3 * tokens[:, -1:] + 1) % VOCABULARY], 1)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=16)


def loss(output: CausalLMOutput, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def main() -> GPT2LMHeadModel:
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    model = make_model()
    pipeline = penstock.Pipeline(
        model,
        method="1f1b",
        stages=2,
        microbatches=4,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        example=torch.zeros(1, LENGTH, dtype=torch.int64),
        group=dist.group.WORLD,  # None without torchrun
    )
    for report in pipeline.run(make_loader()):
        if report.loss is not None:
            print(f"batch {report.batch}: loss {report.loss:.4f}")
    weights = pipeline.full_state_dict()  # all ranks call it, and rank 0 gets it
    if weights:
        model.load_state_dict(weights)  # and model.save_pretrained(...)
    if dist.is_initialized():
        dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
