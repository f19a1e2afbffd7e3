"""What is said of a whole model can be run as it is, and goes back into it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError
from penstock.partition.blocks import named_blocks

VOCABULARY, LENGTH, M = 16, 6, 2


def code_of(model: nn.Module) -> dict[str, Any]:
    """Run the lines of the message, but for those of the pipeline itself, and keep these as text."""
    with pytest.raises(ConfigError, match="is one module, which cannot be cut") as refused:
        named_blocks(model)
    lines = [line.removeprefix("    ") for line in str(refused.value).splitlines()[1:]]
    rest = [line for line in lines if line.startswith(("pipeline = ", "weights = "))]
    names: dict[str, Any] = {"torch": torch, "model": model}
    exec("\n".join(line for line in lines if line not in rest), names)
    return {**names, "rest": rest}


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (3, 2 * M, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def trained(blocks: Any, model: nn.Module, stages: int) -> dict[str, Tensor]:
    pipeline = penstock.Pipeline(
        blocks, "1f1b", stages=stages, microbatches=M, loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )  # fmt: skip
    list(pipeline.run(batches()))
    return pipeline.full_state_dict(model)


def train_plain(model: nn.Module, logits: Any) -> nn.Module:
    """With a gradient of each use of a shared parameter by itself, as stages have them: to rounding."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches():
        optimizer.zero_grad()
        for x, y in zip(inputs.tensor_split(M), targets.tensor_split(M), strict=True):
            (loss(logits(model(x)), y) / M).backward()
        optimizer.step()
    return model


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


@pytest.mark.parametrize("kind", [TwoEmbeddings, Nested])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_lines_cut_a_model_that_goes_on_as_in_plain_torch(kind: type[nn.Module], stages: int) -> None:
    model = kind()
    names = code_of(model)
    assert names["rest"][-1].startswith("weights = pipeline.full_state_dict(model)")
    found, wanted = trained(names["blocks"], model, stages), train_plain(kind(), lambda x: x).state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    kind().load_state_dict(found)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_lines_cut_a_tied_gpt2_of_transformers(attention: str) -> None:
    """Useful ones: a block for each layer; the trained weights go back into the model, which computes with them."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install penstock[hf]")
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 3, "n_head": 2}
    config = transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0, attn_implementation=attention)
    model = transformers.GPT2LMHeadModel(config)
    plain = train_plain(copy.deepcopy(model), lambda found: found.logits)
    names = code_of(model)
    layers = [f"transformer.h.{i}" for i in range(3)]
    assert list(names["blocks"]) == ["transformer", "transformer.drop", *layers, "transformer.ln_f", "lm_head"]
    found = trained(names["blocks"], model, 3)
    again = transformers.GPT2LMHeadModel(config)
    again.load_state_dict(found)
    assert again.lm_head.weight is again.transformer.wte.weight
    assert not torch.equal(found["lm_head.weight"], transformers.GPT2LMHeadModel(config).lm_head.weight)
    with torch.no_grad():
        inputs = batches()[0][0]
        torch.testing.assert_close(again(inputs).logits, plain(inputs).logits, rtol=1e-4, atol=1e-5)
