"""Pairs taken apart: the same passes in the same sequence, and never later than together."""

from __future__ import annotations

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op, passes
from penstock.schedule.proof.check import check
from penstock.schedule.transforms.unfuse import taken_apart
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


@pytest.mark.parametrize(
    ("name", "p", "m", "fused", "apart"),
    [
        ("dualpipe-v", 2, 8, 25, 24.5),
        ("dualpipe-v", 4, 16, 51, 49.5),
        ("dualpipe", 4, 8, 26, 25),
        ("dualpipe", 8, 20, 66, 63),
    ],
)
def test_the_same_passes_in_less_time(name: str, p: int, m: int, fused: float, apart: float) -> None:
    proof = prove(name, p, m)
    other = check(taken_apart(proof.schedule))
    for before, after in zip(proof.schedule.programs, other.schedule.programs, strict=True):
        assert tuple(single for action in before.period for single in passes(action)) == after.period
        assert not any(action.op is Op.FUSED for action in after.period)
    spans = [
        simulate_schedule(one, Costs.uniform(one.schedule, 1.0, 1.0, 1.0)).bubble.makespan for one in (proof, other)
    ]
    assert spans == [fused, apart]
    assert other.activations == proof.activations


def test_a_schedule_without_pairs_is_left_as_it_is() -> None:
    schedule = prove("zb-v", 2, 4).schedule
    assert taken_apart(schedule) is schedule
