"""Sizes and parts of buffers keep no layers together; where something else does, a warning names it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError
from penstock.partition.blocks import cut_blocks, named_blocks
from penstock.partition.whole_model.recomputed_values import recomputed_among, sizes_among
from support.pool import Pool

D, LAYERS, LONGEST = 8, 8, 6
SINGLE = [f"layers.{i}" for i in range(LAYERS)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = torch.tanh(x + mask @ self.map(x))
        return found


class Base(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(16, D), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(D, 16)
        self.register_buffer("mask", torch.rand(LONGEST, LONGEST).tril())


class SlicedInEachLayer(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.mask[: tokens.shape[1], : tokens.shape[1]])
        found: Tensor = self.head(x)
        return found


class SizeReadOnce(Base):
    """Also of the other dimension, in the last step."""

    def forward(self, tokens: Tensor) -> Tensor:
        samples, length = tokens.size()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.mask[None, :length, :length].squeeze(0).expand(tokens.size(0), -1, -1))
        found: Tensor = self.head(x).view(samples, length, -1)
        return found


class MadeInEachLayer(Base):
    """Which costs something, and so is not taken again elsewhere; but it need not be alive where a cut is."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, torch.ones(tokens.shape[1], tokens.shape[1]).tril())
        found: Tensor = self.head(x)
        return found


class OneMaskForTheFirstLayers(Base):
    """The last layers have fewer values between them than the first."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, short, long = self.embed(tokens), self.mask[:5, :5] * 0.5, self.mask[:5, :5] * 0.25
        for i, layer in enumerate(self.layers):
            x = layer(x, short + long if i < 6 else long)
        found: Tensor = self.head(x)
        return found


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(16, (3, 4, 6), generator=torch.Generator().manual_seed(0))
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_pipeline(model: nn.Module, group: dist.ProcessGroup | None = None) -> penstock.Pipeline:
    return penstock.Pipeline(
        model, "1f1b", stages=2, microbatches=2, loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5), group=penstock.Group(group, 20.0),
    )  # fmt: skip


MODELS = {
    SlicedInEachLayer: ["embed", *SINGLE, "head"],
    SizeReadOnce: ["embed", *SINGLE, "head"],
    MadeInEachLayer: ["embed", *SINGLE, "head"],
    OneMaskForTheFirstLayers: ["embed", "mul", "mul_2", *SINGLE, "head"],
}


@pytest.mark.parametrize("kind", MODELS)
def test_layers_with_masks_of_their_own_are_divided_evenly(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    pipeline = make_pipeline(model)
    assert [name for part in pipeline.parts for name in part] == MODELS[kind]
    assert [sum("layers" in name for name in part) for part in pipeline.parts] == [4, 4]
    assert caplog.messages == []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for batch, report in zip(batches(), pipeline.run(batches()), strict=True):
        optimizer.zero_grad()
        wanted = loss(plain(batch[0]), batch[1])
        wanted.backward()
        optimizer.step()
        assert report.loss == pytest.approx(wanted.item(), rel=1e-6)
    found = pipeline.full_state_dict()
    assert list(found) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def train(group: dist.ProcessGroup | None) -> list[Any]:
    found: list[Any] = []
    for kind in (SlicedInEachLayer, SizeReadOnce):
        pipeline = make_pipeline(kind(), group)
        for _ in range(2):
            found += [report.loss for report in pipeline.run(batches())]
            found.append(pipeline.evaluate(batches()))
    return found


@pytest.mark.long
def test_between_processes_the_input_travels_for_its_sizes(pool: Pool) -> None:
    _, found = pool.submit(train, ranks=2)
    assert found == train(None)


# --- what is said where layers stay together --------------------------------------------------------------------------


class SizeOfActivations(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = x.shape[1]
        for layer in self.layers:
            x = layer(x, self.mask[:length, :length])
        found: Tensor = self.head(x)
        return found


class InPlace(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = self.mask[:5, :5] * 2
        for layer in self.layers:
            x = layer(x, mask)
            x += 1
        found: Tensor = self.head(x * mask.sum())
        return found


class ManyValues(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        masks = [self.mask[:5, :5] * k for k in range(4)]
        for layer in self.layers[:-1]:  # type: ignore[attr-defined]
            x = layer(x, masks[0] + masks[1] + masks[2] + masks[3])
        found: Tensor = self.head(self.layers[-1](x, masks[0]))
        return found


@pytest.mark.parametrize(
    ("kind", "block", "said"),
    [
        (SizeOfActivations, "'layers.0..layers.6' holds 7 layers", "embed(...).shape is read before layers.1"),
        (InPlace, "'layers.0..layers.7' holds 8 layers", "the forward writes into values in place (add_)"),
        (ManyValues, "'layers.0..layers.5' holds 6 layers", "5 values are alive between its layers"),
    ],
)
def test_layers_that_stay_together_are_warned_about_with_the_reason(
    kind: type[nn.Module], block: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_pipeline(kind())
    (message,) = caplog.messages
    assert message.startswith("stage 0 has ")
    assert f"might have 51%, but block {block}, since {said}" in message


def test_where_there_are_too_few_blocks_it_says_what_keeps_layers_together() -> None:
    with pytest.raises(
        ConfigError, match="the model has 3 blocks, .* use fewer stages; block 'layers.0..layers.7' holds"
    ):
        cut_blocks(named_blocks(InPlace()), 5)


def test_a_partition_by_hand_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model = InPlace()
    penstock.Pipeline(
        model, "1f1b", stages=2, microbatches=2, loss=loss, partition=[1, len(named_blocks(model)) - 1],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.5),
    )  # fmt: skip
    assert caplog.messages == []


# --- what is taken again ----------------------------------------------------------------------------------------------


class Asks(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, 4))
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Any:
        size = x.shape[0]
        y = x * 2
        yes = (size, 2 * size + 1, self.table[:size].unsqueeze(0).transpose(1, 2))
        no = (x.dtype, y.shape[0], self.weight[:size], self.table[:size] + 1, x[:size], self.table[: y.shape[0]])
        return yes, no


@pytest.mark.parametrize("constant", [True, False])
def test_only_what_costs_nothing_and_is_the_same_everywhere_is_taken_again(constant: bool) -> None:
    """A precision of its own may change what travels, and a buffer may be written by a module."""
    tracer = fx.Tracer()
    tracer.proxy_buffer_attributes = True
    graph = tracer.trace(Asks())
    nodes = list(graph.nodes)
    steps = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
    again = recomputed_among(steps, sizes_among(steps), nodes[0], lambda path: constant and path == "table")
    yes, no = nodes[-1].args[0]
    assert [node in again for node in yes] == [True, True, constant]
    assert [node in again for node in no] == [False] * len(no)
