"""1F1B with an output layer that is divided among all ranks."""

from __future__ import annotations

import pytest

from penstock import Costs, make_schedule
from penstock.schedule.ir.schedule import Op, Schedule, passes
from penstock.schedule.orders.vocabulary_parallel import vocabulary_1f1b
from penstock.simulate.costs import StageCost


def passes_of(schedule: Schedule, rank: int) -> list[tuple[Op, int, int]]:
    return [(p.op, p.stage.index, p.unit.first) for a in schedule.programs[rank].period for p in passes(a)]


@pytest.mark.parametrize(("stages", "m"), [(1, 4), (2, 3), (4, 8), (4, 2), (8, 24)])
def test_two_more_microbatches_are_in_flight_than_under_1f1b(stages: int, m: int) -> None:
    """The paper's Algorithm 1: p + 2 on the first rank, one less on each after it."""
    schedule = make_schedule(vocabulary_1f1b, stages, m).schedule
    for rank in range(stages):
        held, most = 0, 0
        for op, index, _ in passes_of(schedule, rank):
            held += {Op.F: 1, Op.B: -1}.get(op, 0) * (index == rank)
            most = max(most, held)
        assert most == min(stages - rank + 2 if stages > 1 else 1, m)


@pytest.mark.parametrize(("stages", "m"), [(2, 3), (4, 8)])
def test_every_stage_runs_microbatches_in_their_order(stages: int, m: int) -> None:
    """So that gradients are added in the order of the reference; none is left out, and none runs twice."""
    schedule = make_schedule(vocabulary_1f1b, stages, m).schedule
    found: dict[tuple[Op, int], list[int]] = {}
    for rank in range(stages):
        for op, index, k in passes_of(schedule, rank):
            if op in (Op.F, Op.B):
                found.setdefault((op, index), []).append(k)
    assert found == {(op, index): list(range(m)) for op in (Op.F, Op.B) for index in range(2 * stages + 1)}


def times(*stages: float) -> Costs:
    return Costs(tuple(StageCost(time, time, time) for time in stages))


@pytest.mark.parametrize("head", [0.25, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_head_no_longer_holds_the_last_rank_up(stages: int, head: float) -> None:
    """Against 1F1B whose last rank also has a head of so many layers (a rank has one layer)."""
    m = 8 * stages
    parts = [head / stages] * stages
    divided = make_schedule(vocabulary_1f1b, stages, m).simulate(times(*[1.0] * stages, *parts, 0.0)).timeline.makespan
    whole = make_schedule("1f1b", stages, m).simulate(times(*[1.0] * (stages - 1), 1.0 + head)).timeline.makespan
    busy = 3 * m * (1 + head / stages)
    assert busy <= divided <= 1.12 * busy
    assert divided < whole


def test_its_passes_on_two_ranks() -> None:
    """The example of the module."""
    schedule = make_schedule(vocabulary_1f1b, 2, 3).schedule
    names = {(Op.F, 0): "F", (Op.F, 1): "S", (Op.F, 2): "L", (Op.B, 0): "B", (Op.B, 1): "T", (Op.B, 2): "l"}
    drawn = [
        " ".join(f"{names[op, index // 2]}{k}" for op, index, k in passes_of(schedule, rank) if op in (Op.F, Op.B))
        for rank in (0, 1)
    ]
    assert drawn == [
        "F0 F1 S0 F2 S1 T0 S2 T1 B0 T2 B1 B2",
        "F0 S0 F1 S1 L0 l0 T0 F2 S2 L1 l1 T1 B0 L2 l2 T2 B1 B2",
    ]
