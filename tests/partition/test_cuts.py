"""Where models are cut: by work, bytes and time, and by hand; and layers in place at a cut, or run again."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Partition, Pipeline
from penstock.errors import ConfigError, PenstockError
from penstock.partition.blocks import cut_blocks, named_blocks
from penstock.partition.replay.model_stages import UnitBlocks
from support.pool import Pool

WIDTH = 6


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width)


class Residual(nn.Module):
    """Two layers with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Towers(nn.Module):
    """An encoder and a decoder, each a list of layers, and a head."""

    def __init__(self, kind: Callable[[], nn.Module] = Residual, head: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.block = nn.ModuleList([kind() for _ in range(layers)])
        self.decoder.block = nn.ModuleList([kind() for _ in range(layers)])
        self.head = linear(head)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.encoder.block, *self.decoder.block):
            x = layer(x)
        found: Tensor = self.head(x)
        return found


EXAMPLE = torch.ones(4, WIDTH).double()


def pipeline_of(model: Any, method: str = "1f1b", stages: int = 2, **options: Any) -> Pipeline:
    return Pipeline(
        model, method, stages=stages, microbatches=2, loss=F.mse_loss, seed=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1), **options,
    )  # fmt: skip


def towers(**options: Any) -> Pipeline:
    return pipeline_of(Towers().double(), example=EXAMPLE, **options)


ENCODER, DECODER = [f"encoder.block.{i}" for i in range(3)], [f"decoder.block.{i}" for i in range(3)]
BY_HAND: list[tuple[dict[str, Any], list[list[str]]]] = [
    ({"cut": ["encoder.block.2"]}, [ENCODER[:2], [ENCODER[2], *DECODER, "head"]]),
    ({"cut": ["decoder.block"]}, [ENCODER, [*DECODER, "head"]]),
    (
        {"cut": ["decoder.block.1.down"]},
        [[*ENCODER, DECODER[0], f"{DECODER[1]}.up"], [f"{DECODER[1]}.down", DECODER[2], "head"]],
    ),
    ({"units": ["encoder.block", "decoder.block"]}, [ENCODER, [*DECODER, "head"]]),
    (
        {"units": ["encoder.block.0.up"], "cut": ["head"]},
        [[f"{ENCODER[0]}.up", f"{ENCODER[0]}.down", *ENCODER[1:], *DECODER], ["head"]],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "parts"), BY_HAND, ids=str)
def test_stages_of_a_model_are_chosen_by_hand(options: dict[str, Any], parts: list[list[str]]) -> None:
    assert towers(partition=Partition(**options)).parts == parts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cut": ["encoder.blok.2"]}, r"cut: the model has no module 'encoder.blok.2'. Did you mean 'encoder.block.2'"),
        ({"units": ["decoder.blocks"]}, r"units: the model has no module .* Did you mean 'decoder.block'"),
        ({"cut": ["decoder.block.1", "head"]}, "so 1 for 2 stages"),
        ({"cut": ["encoder.block.0"]}, "the first block of each stage but the first, in the order of the model"),
        ({"cut": "head"}, "cut must be a list of names"),
        ({"cut": ["head"], "balance": [6, 1]}, "balance and cut"),
        ({"by": "tim"}, "by must be 'work' or 'time'"),
    ],
)
def test_a_choice_that_does_not_fit_the_model_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        towers(partition=Partition(**options))


def test_blocks_are_cut_by_name() -> None:
    blocks = {"a": linear(), "b": linear(), "c": linear(), "d": linear()}
    assert pipeline_of(blocks, partition=Partition(cut=["d"])).parts == [["a", "b", "c"], ["d"]]
    with pytest.raises(ConfigError, match="cut: the model has no block 'e'"):
        pipeline_of(blocks, partition=Partition(cut=["e"]))
    with pytest.raises(ConfigError, match="units are those of a whole model"):
        pipeline_of(blocks, partition=Partition(units=["a"]))
    with pytest.raises(ConfigError, match="by='time' measures .* pass example=inputs"):
        pipeline_of(blocks, partition=Partition(by="time"))


class Slow(nn.Linear):
    """A small layer that takes long."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return super().forward(x)


def cut_by_time(group: Any, whole: bool) -> list[list[str]]:
    layers = [linear(), Slow(), linear(), linear()]
    model = nn.Sequential(*layers) if whole else layers
    return pipeline_of(model, stages=3, example=EXAMPLE.float(), partition=Partition(by="time"), group=group).parts


@pytest.mark.parametrize("whole", [False, True])
def test_stages_are_balanced_by_measured_time(whole: bool) -> None:
    assert cut_by_time(None, whole) == [["0"], ["1"], ["2", "3"]]


def test_processes_take_the_cut_that_one_has_measured(pool: Pool) -> None:
    assert [parts[1] for parts in pool.submit(cut_by_time, True, ranks=3)] == [["1"]] * 3


@pytest.mark.parametrize(
    ("costs", "taken", "sizes"),
    [
        ([10, 10, 10, 10.5, 10], [0, 8, 8, 8, 1], [3, 2]),  # 20 % more for fewer bytes is too much
        ([5, 1, 20, 1, 5.5], [0, 8, 8, 2, 4], [3, 2]),
        ([50, 1, 1, 50], [0, 8, 8, 1], [3, 1]),  # 2 % are not
        ([50, 1, 1, 50], [0, 8, 8, 8], [2, 2]),
    ],
)
def test_among_cuts_that_are_nearly_even_fewer_bytes_travel(costs: Any, taken: Any, sizes: list[int]) -> None:
    blocks = {str(i): SimpleNamespace(cost=c, taken=t) for i, (c, t) in enumerate(zip(costs, taken, strict=True))}
    assert [len(part) for part in cut_blocks(blocks, 2)] == sizes


def test_the_bytes_that_a_cut_sends_and_the_work_between_layers_are_counted() -> None:
    class Products(Residual):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.up(x)) @ torch.ones(WIDTH, WIDTH).double()
            return x + self.down(h)

    blocks = UnitBlocks(Products().double(), EXAMPLE, 2)
    operations, weights = 2 * 4 * WIDTH * WIDTH, WIDTH * WIDTH + WIDTH
    assert [block.cost for block in blocks.values()] == [2 * operations + weights, operations + weights]
    assert [block.taken for block in blocks.values()] == [0, 2 * EXAMPLE.nbytes]  # h, and x for the skip


@pytest.mark.parametrize(
    ("model", "stages", "said"),
    [
        (
            lambda: Towers(head=1000),
            2,
            r"stage 1 has \d\d% .* even share is 50%; 'head' alone is .*; use fewer stages$",
        ),
        (lambda: Towers(linear, layers=2), 3, "stage 1 has 46% .*no other cut.*; use 2 stages, which are even$"),
        (lambda: Towers(), 2, None),
        (lambda: [nn.Linear(WIDTH, 1000), nn.Linear(1000, WIDTH), linear(), linear()], 3, None),  # nobody counted work
    ],
)
def test_uneven_stages_are_said_once_with_their_reason(
    model: Any, stages: int, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = model()
    with caplog.at_level(logging.WARNING, "penstock"):
        cut_blocks(named_blocks(made, EXAMPLE.float() if isinstance(made, nn.Module) else None, stages), stages)
    assert len(caplog.messages) == (said is not None)
    if said is not None:
        assert re.search(said, caplog.text), caplog.text


class Asking(Residual):
    """Asks for an array between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h) * (1.0 if h.detach().numpy().sum() > 1e9 else 0.5)


def in_place() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), linear(), nn.Tanh(), linear())


class Mixed(nn.Module):
    """Layers of several kinds, between plain ones."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.odd, self.plain, self.again, self.head = linear(), kind(), Residual(), kind(), linear(2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.again(self.plain(self.odd(self.first(x)))))
        return found


@pytest.mark.parametrize(
    ("kind", "units"),
    [(Asking, ["odd", "again"]), (in_place, ["odd.1", "odd.3", "again.1", "again.3"])],
)
def test_only_layers_whose_code_cannot_be_divided_stay_whole(kind: Any, units: list[str]) -> None:
    """They are kept, others are opened; and one that writes into its argument is opened, so that this is seen."""
    torch.manual_seed(0)
    blocks = UnitBlocks(Mixed(kind).double(), EXAMPLE, 9)
    assert {*blocks} == {"first", *units, "plain.up", "plain.down", "head"}


class Convolutions(nn.Module):
    """In the style of VGG and of DenseNet: convolutions with activations in place, joined."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace)
        )
        self.dense = nn.Sequential(nn.BatchNorm2d(5), nn.ReLU(inplace), nn.Conv2d(5, 3, 1))
        self.head = nn.Sequential(nn.ReLU(inplace), nn.Linear(27, 4), nn.ReLU(inplace), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.dense(torch.cat((x, self.features(x)), 1)).flatten(1))
        return found


def layers_of(inplace: bool) -> nn.Sequential:
    model = Convolutions(inplace)
    return nn.Sequential(*model.features, nn.Flatten(), *model.head)


def trained(make: Callable[[bool], nn.Module], inplace: bool, **options: Any) -> tuple[list[float | None], Any]:
    torch.manual_seed(0)
    pipeline = pipeline_of(make(inplace).double(), **options)
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(4, 20, generator=generator).double() for _ in range(2)]
    losses = [report.loss for report in pipeline.run((d[:, :18].unflatten(1, (2, 3, 3)), d[:, 18:]) for d in data)]
    return losses, pipeline.full_state_dict()


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "2bw"])
@pytest.mark.parametrize("whole", [False, True])
def test_layers_in_place_may_be_anywhere(whole: bool, method: str, recompute: str) -> None:
    """At the beginning of a stage, and where blocks are run again: with the bits of layers that make new tensors."""
    options: dict[str, Any] = {"method": method, "recompute": recompute, "stages": 3}
    options["partition"] = Partition(cut=["dense", "head.1"] if whole else ["1", "6"])
    if whole:
        options["example"] = torch.randn(2, 2, 3, 3).double()
    make = Convolutions if whole else layers_of
    (wanted, weights), (found, state) = (trained(make, inplace, **options) for inplace in (False, True))
    assert found == wanted
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())


def test_a_block_that_writes_into_a_parameter_is_refused() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.mul_(1.0)

    with pytest.raises(PenstockError, match="writes in place into a parameter"):
        list(pipeline_of([linear(), Wrong(WIDTH, WIDTH)]).run([(EXAMPLE.float(), EXAMPLE.float())]))


def test_a_model_without_values_is_recorded_and_cut() -> None:
    """On meta, with code that looks at what does not depend on weights, such as positions and masks."""

    class Positions(Towers):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            places = torch.arange(h.shape[0], device=h.device)
            return h.masked_fill(places[:, None] > 2, 0.0) if (places >= 0).all() else h

    with torch.device("meta"):
        model = Positions(linear, head=WIDTH)
    blocks = UnitBlocks(model, EXAMPLE.float(), 2)
    assert [len(part) for part in cut_blocks(blocks, 2)] == [3, 4]
