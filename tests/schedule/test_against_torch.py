"""Where torch.distributed.pipelining has the same order, its table is ours, action by action; or it is said why not."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from penstock.schedule.ir.schedule import Action, Op, Schedule
from support.schedules import make_schedule
from support.torch_schedules import torch_schedule

SAME = {
    "ScheduleGPipe": ("gpipe", 1, [(2, 3), (4, 8)]),
    "ScheduleInterleaved1F1B": ("interleaved", 2, [(2, 2), (2, 3), (2, 4), (4, 4), (4, 6), (4, 8), (4, 12)]),
    "ScheduleInterleavedZeroBubble": ("zb-interleaved", 2, [(2, 2), (2, 4), (4, 4), (4, 8)]),
    "ScheduleZBVZeroBubble": ("zb-v", 2, [(2, 3), (2, 4), (4, 4), (4, 8), (4, 10)]),
    "ScheduleDualPipeV": ("dualpipe-v", 2, [(2, 4), (2, 6), (4, 8), (4, 11)]),
}
CASES = [(name, method, v, p, m) for name, (method, v, shapes) in SAME.items() for p, m in shapes]


def theirs(name: str, p: int, m: int, v: int) -> list[list[str]]:
    table = torch_schedule(name, p, m, v).pipeline_order
    return [[_cell(a) for a in table[r] if a is not None and "REDUCE" not in str(a)] for r in sorted(table)]


def _cell(action: Any) -> str:
    return "+".join(map(str, action.sub_actions)) if action.sub_actions else str(action)


def ours(schedule: Schedule) -> list[list[str]]:
    def text(action: Action) -> str:
        return "+".join(f"{p.stage.index}{p.op}{p.unit.first}" for p in action.parts or (action,))

    return [[text(a) for a in program.period if a.op is not Op.STEP] for program in schedule.programs]


@pytest.mark.parametrize(("name", "method", "v", "p", "m"), CASES)
def test_the_same_table(name: str, method: str, v: int, p: int, m: int) -> None:
    assert ours(make_schedule(method, p, m)) == theirs(name, p, m, v)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_three_chunks(p: int, m: int) -> None:
    schedule = make_schedule("interleaved", p, m, options={"chunks": 3})
    assert ours(schedule) == theirs("ScheduleInterleaved1F1B", p, m, 3)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 4), (3, 6), (4, 8)])
def test_zb_h1_is_their_zero_bubble_on_one_chunk(p: int, m: int) -> None:
    """docs/benchmarks.md compares the two for that; torch's class wants a list of stages, of one here."""
    stage = Mock(spec=_PipelineStageBase)
    stage.num_stages = stage.group_size = p
    stage.group_rank, stage.stage_index, stage.is_first, stage.is_last, stage.submod = 0, 0, True, False, None
    table = schedules.ScheduleInterleavedZeroBubble([stage], m, loss_fn=lambda output, target: None).pipeline_order
    cells = [[_cell(a) for a in table[r] if a is not None and "REDUCE" not in str(a)] for r in range(p)]
    assert ours(make_schedule("zb-h1", p, m)) == cells


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (4, 8)])
def test_breadth_first_but_for_the_order_of_backwards(p: int, m: int) -> None:
    """Theirs run last in, first out; ours first in, first out, so that gradients accumulate in microbatch order."""
    schedule = make_schedule("breadth-first", p, m)
    for mine, their in zip(ours(schedule), theirs("ScheduleLoopedBFS", p, m, 2), strict=True):
        assert mine[: 2 * m] == their[: 2 * m]
        for chunk in (1, 2):
            part = slice((chunk + 1) * m, (chunk + 2) * m)
            assert mine[part] == their[part][::-1]


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 4), (4, 8)])
def test_1f1b_but_for_a_slip_in_their_table(p: int, m: int) -> None:
    """On the last rank, which has no warm-up, torch 2.13 prints forwards numbered one too high; it runs the others."""
    *first, mine = ours(make_schedule("1f1b", p, m))
    *others, their = theirs("Schedule1F1B", p, m, 1)
    assert first == others
    last = p - 1
    slipped = [f"{last}F{k // 2 + 1}" if k % 2 == 0 else f"{last}B{k // 2}" for k in range(2 * m)]
    assert their in (slipped, mine)  # or a later torch has mended it
