"""How many updates of others a wave may miss, and whom nobody waits for."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from penstock.options.parallelism import DataParallel
from penstock.options.passes import PrecisionName
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.methods.data_parallel_sync import Combine
from support.cases import make_batches, make_pipeline
from support.schedules import make_schedule
from support.wave_cases import case_of


class Counts(nn.Module):
    """Its parameter counts the updates of each pipeline that its weights have; it takes down what a forward sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(width))

    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled():
            for row in x:
                Counts.forwards.append((int(row[0]), int(row[1]), self.seen.detach().tolist()))
        # The gradient of the parameter is -1 at the place of the pipeline.
        return torch.cat([x, -(self.seen[x[:, 1].long()])[:, None]], dim=1)

    forwards: ClassVar[list[tuple[int, int, list[float]]]] = []


def count_missing(in_flight: int, distance: int, precision: PrecisionName) -> int:
    """The most updates of minibatches before its own that a forward misses, of another pipeline."""
    width, count = 2, (distance + 3) * in_flight
    Counts.forwards.clear()
    blocks = {"first": Counts(width)} | {f"on{s}": Pass() for s in range(1, in_flight)}
    batches = [[(torch.tensor([[float(t), float(r)]]), torch.zeros(1)) for r in range(width)] for t in range(count)]
    pipeline = Pipeline(
        blocks,
        make_schedule("stash", in_flight, 1),
        loss=lambda out, _: (out[:, 2].sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        data_parallel=DataParallel(width=width, combine=Combine("wsp", every=in_flight, distance=distance)),
        partition=[1] * in_flight,
        precision=precision,
    )
    list(pipeline.run(batches))
    return max(t - int(seen[1 - r]) for t, r, seen in Counts.forwards)


class Pass(nn.Module):
    """Hands on; its own parameter counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 * self.idle


@pytest.mark.long
@pytest.mark.parametrize(
    ("in_flight", "distance", "missing", "precision"),
    [
        (1, 0, 0, "fp32"),
        (2, 1, 4, "fp32"),
        (4, 0, 6, "fp32"),
        (4, 1, 10, "bf16"),
        (4, 4, 22, "fp32"),
        (7, 4, 40, "fp32"),
    ],
)
def test_the_bound_on_missing_updates(in_flight: int, distance: int, missing: int, precision: PrecisionName) -> None:
    """HetPipe, section 5: s_global = (D + 1)(s_local + 1) + s_local - 1, which stashing reaches and does not pass."""
    local = in_flight - 1
    assert missing == (distance + 1) * (local + 1) + local - 1
    assert count_missing(in_flight, distance, precision) == missing


class Watched(list[Any]):
    """A batch that takes down who reads it."""

    log: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, number: int, m: int, pairs: Any) -> None:
        super().__init__(pairs)
        self.number, self.m = number, m

    def __getitem__(self, k: Any) -> Any:
        Watched.log.append((k // self.m, self.number))
        return super().__getitem__(k)


@pytest.mark.parametrize("distance", [0, 1, 2])
def test_nobody_waits_for_a_pipeline_that_is_few_waves_behind(distance: int) -> None:
    """In one process a pipeline has the turn until it must wait: the first one, for the end of wave 0 of the other."""
    case = case_of("1f1b", 1, 1, 2, "momentum", spans=(12,))
    combine = Combine("wsp", every=2, distance=distance)
    Watched.log.clear()
    list(make_pipeline(case, combine=combine).run([Watched(t, 1, b) for t, b in enumerate(make_batches(case))]))
    reads = Watched.log[: next(i for i, (r, _) in enumerate(Watched.log) if r == 1)]
    assert [t for _, t in reads] == list(range(2 * (distance + 1)))
