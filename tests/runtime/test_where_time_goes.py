"""What slows a run on purpose is found again, under its name.

Sleeps are long and bounds are wide, because machines have other things to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.all_reduce import GlooReducer
from penstock.idle_time import TimeSplit, split_time
from support.cases import Case, make_batches, make_pipeline, mixed
from support.pool import Pool

NAP = 0.03
CASE = Case("2bw", 2, 4, spans=(4,), skips=())
MICROBATCHES = 16


def check_sums(split: TimeSplit) -> None:
    for busy, idle in zip(split.busy, split.idle, strict=True):
        assert busy + sum(idle) == pytest.approx(split.makespan)
        assert min(idle) >= 0


class SlowBatch(Sequence[Any]):
    """Makes its microbatches when they are asked for, and takes its time."""

    def __init__(self, batch: list[Any]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, k: Any) -> Any:
        time.sleep(NAP)
        return self.batch[k]


def slow_data(case: Case) -> Iterator[SlowBatch]:
    """Another way to be slow: between two batches."""
    for batch in make_batches(case):
        time.sleep(NAP)
        yield SlowBatch(batch)


def read_slowly(group: dist.ProcessGroup | None) -> TimeSplit:
    pipeline = make_pipeline(CASE, group)
    list(pipeline.run(slow_data(CASE)))
    return split_time(pipeline.timeline())


@pytest.mark.slow
def test_a_slow_dataset_is_data(pool: Pool) -> None:
    """The first sample is read before the first work; those of the other batches, and these themselves, are not."""
    alone, (both, _) = read_slowly(None), pool.submit(read_slowly, ranks=2)
    for split in (alone, both):
        check_sums(split)
        assert NAP * (MICROBATCHES - 1 + 2) <= split.idle[0].data <= split.makespan
    assert alone.idle[1].data < alone.idle[0].data / 4  # what one stage has read is there for the other
    assert both.idle[1].data >= NAP * (MICROBATCHES - 1)


def slow(x: Tensor) -> Tensor:
    time.sleep(NAP)
    return x * 1.0


def slow_first_stage(group: dist.ProcessGroup | None) -> TimeSplit:
    pipeline = make_pipeline(CASE, group, blocks=mixed() | {"tanh": slow})
    list(pipeline.run(make_batches(CASE)))
    return split_time(pipeline.timeline())


def test_a_slow_first_stage_is_imbalance_elsewhere(pool: Pool) -> None:
    alone, (both, _) = slow_first_stage(None), pool.submit(slow_first_stage, ranks=2)
    for split in (alone, both):
        check_sums(split)
        assert split.busy[0] >= NAP * MICROBATCHES
        assert split.idle[1].imbalance > NAP * MICROBATCHES / 4  # in one process, the rest is for the other's turns
        assert split.idle[0].imbalance < split.idle[1].imbalance
    assert alone.idle[1].communication < NAP * MICROBATCHES / 2  # a message that is there is not under way


def slow_reduction(group: dist.ProcessGroup) -> TimeSplit:
    case = Case("1f1b", 1, 2, width=2, spans=(4,), skips=())
    add = GlooReducer._add

    def add_slowly(self: GlooReducer, *arguments: Any) -> Iterator[None]:
        time.sleep(2 * NAP)  # once per batch: a stage has one gradient, of one piece
        return add(self, *arguments)

    GlooReducer._add = add_slowly  # type: ignore[method-assign]
    try:
        pipeline = make_pipeline(case, group)
        list(pipeline.run(make_batches(case)))
        return split_time(pipeline.timeline())
    finally:
        GlooReducer._add = add  # type: ignore[method-assign]


def test_a_slow_reduction_is_control(pool: Pool) -> None:
    split, _ = pool.submit(slow_reduction, ranks=2)
    check_sums(split)
    for rank in (0, 1):
        assert split.idle[rank].control > 2 * NAP * 4 * 0.9
