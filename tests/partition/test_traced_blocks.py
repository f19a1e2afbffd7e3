"""A whole model is divided into blocks that train as plain torch does; where they would not, it is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError
from penstock.partition.blocks import named_blocks
from support.asserting_model import Asserts
from support.traceable_models import (
    Base,
    D,
    Decoder,
    Foreign,
    MaskMadeOnce,
    Patches,
    ResNet,
    Skips,
    Twofold,
    images,
    loss,
    tokens,
    vectors,
)

ENCODER = ["encoder.layers.0", "encoder.layers.1", "encoder.norm"]
DIVIDED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], list[str]]] = {
    "resnet": (
        ResNet, images,
        ["conv1", "bn1", "relu", "maxpool", "layer1.0", "layer1.1", "layer2.0", "relu_2", "avgpool", "flatten", "fc"],
    ),
    "vision": (
        Patches, images,
        ["embed", "flatten", "transpose", "cat", "add", *ENCODER, "getitem", "head"],
    ),
    "decoder": (
        Decoder, tokens,
        ["body.tok..body.pos", *(f"body.layers.{i}" for i in range(3)), "body.norm", "mul", "lm_head", "truediv"],
    ),
    "asserts": (Asserts, tokens, ["wte..wpe", "drop", "h.0", "h.1"]),
    "skips": (Skips, vectors, ["first", "tanh", "second..third", "gelu", "last"]),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 3),
        vectors, ["layers.0", "layers.1", "layers.2"],
    ),
    "foreign": (Foreign, vectors, ["first", "second", "fft_fft", "getattr"]),
    "masked": (MaskMadeOnce, tokens, ["embed", "tril", *(f"layers.{i}" for i in range(4)), "head"]),
    "sequential": (lambda: Twofold(nn.Linear(D, D), nn.Tanh()), vectors, ["0", "1", "mul"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DIVIDED)
def test_a_divided_model_trains_a_batch_as_plain_torch(case: str) -> None:
    """The message leaves the model as it was; the pipeline writes into it."""
    make, batch, names = DIVIDED[case]
    torch.manual_seed(0)
    model = make()
    plain, kept = copy.deepcopy(model), {name: set(vars(part)) for name, part in model.named_modules()}
    blocks = named_blocks(model)
    assert list(blocks) == names
    assert {name: set(vars(part)) for name, part in model.named_modules()} == kept
    inputs, targets = batch()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain_loss = loss(plain(inputs), targets[:, None, None] if plain(inputs).dim() == 3 else targets[:, None])
    optimizer.zero_grad()
    plain_loss.backward()
    optimizer.step()
    pipeline = penstock.Pipeline(
        model, "1f1b", stages=2, microbatches=1,
        loss=lambda output, target: loss(output, target[:, None, None] if output.dim() == 3 else target[:, None]),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
    )  # fmt: skip
    (report,) = pipeline.run([(inputs, targets)])
    assert report.loss == pytest.approx(plain_loss.item(), rel=1e-5)
    found = pipeline.full_state_dict()
    wanted = dict(plain.state_dict())
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        if "running" not in name and "num_batches" not in name:  # plain torch was called twice
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


# --- what is refused -------------------------------------------------------------------------------------------


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if x.sum() > 0 else x  # type: ignore[no-any-return]


class Drops(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x), 0.5, self.training))  # type: ignore[no-any-return]


class Frozen(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)  # type: ignore[no-any-return]


class Half(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
        return self.second(x)  # type: ignore[no-any-return]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Straight(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(_Rounded.apply(self.first(x)))  # type: ignore[no-any-return, no-untyped-call]


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Noise(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + torch.randn(D))  # type: ignore[no-any-return]


class Asks(Base):
    def forward(self, x: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else x[0]
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Shares(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(self.first(x)))  # type: ignore[no-any-return]


class Pairs(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return x, self.second(x)


class Names(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.second(self.first(x))}


class Joins(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x) + self.second(y)  # type: ignore[no-any-return]


class Writes(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1)  # type: ignore[operator]
        return self.second(self.first(x))  # type: ignore[no-any-return]


class LayerDrop(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 1e-9:
            return x
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Unwritten(Base):
    pass


def hooked() -> nn.Module:
    model = Skips()
    model.register_forward_hook(lambda *_: None)
    return model


REFUSED: dict[Callable[[], nn.Module], str] = {
    Branches: r"it looks at its input \(TraceError: symbolically traced variables cannot be used",
    Drops: "it does something else in training, beside its modules",
    Frozen: r"it has a part under torch.no_grad\(\)",
    Half: "it has a part under torch.autocast",
    Straight: r"it has a part under torch.no_grad\(\), or a torch.autograd.Function",
    Counts: r"it keeps something on the module \(step\)",
    Noise: "it makes a tensor of its own, whatever the input",
    Asks: r"it asks for types \(isinstance\)",
    Shares: "it calls first more than once",
    Pairs: "it does not return one value that its modules compute, but a sequence of 2; let it return only what the",
    Names: "it does not return one value that its modules compute, but a dict with 'logits'; let it return only",
    Joins: r"it takes 2 values \(x, y\), and a block takes one",
    Writes: "it writes into scale",
    LayerDrop: "it draws random numbers beside its modules",
    Unwritten: "it has none",
    hooked: "it has hooks, which blocks would not call",
    lambda: nn.Transformer(D, 2, 1, 1, 16, batch_first=True): r"it takes 2 values \(src, tgt\)",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: getattr(make, "__name__", ""))
def test_where_blocks_would_compute_something_else_it_says_what_to_write(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    with pytest.raises(ConfigError, match=rf"cannot be followed to divide it into blocks: {REFUSED[make]}") as refused:
        named_blocks(model)
    assert "example=inputs" in str(refused.value)
    for name, part in model.named_modules():
        assert all(vars(part)[key] is value for key, value in before[name].items())
        assert vars(part).keys() == before[name].keys()


def test_with_an_example_it_is_divided() -> None:
    model = Pairs()
    with pytest.raises(ConfigError, match=r"pass example=inputs.*penstock.Pipeline\(model, ..., example=inputs\)"):
        named_blocks(model)
    assert len(named_blocks(model, torch.ones(1, D))) > 1
