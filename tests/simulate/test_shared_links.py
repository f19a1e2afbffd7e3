"""Ranks that share the link of a host: by hand, against what a link can carry, and where nobody shares any."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Op
from penstock.schedule.ir.sharding import Level
from penstock.schedule.machine.shared_machine import (
    Ended,
    Shared,
    SharedCores,
    SharedLinks,
    SharedMachine,
    SharedTime,
    Sharing,
)
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.transforms.batch_ops import with_reductions
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Interval
from support.schedules import make_schedule

SWEEP = settings(max_examples=40, derandomize=True, deadline=None, database=None)
times = st.sampled_from([0.5, 1.0, 2.0]) | st.floats(0.01, 4.0)
maybe = st.just(0.0) | times
PROOFS = [
    check(schedule)
    for schedule in (
        make_schedule("1f1b", 2, 4),
        make_schedule("1f1b", 3, 4),
        make_schedule("2bw", 3, 4),
        with_reductions(make_schedule("interleaved", 2, 4), everywhere=True),
        make_schedule("chimera", 4, 4),
        make_schedule("layered", 2, 4),
        make_schedule("depth-first-full", 2, 4),
    )
]


@st.composite
def costs_of(draw: st.DrawFn, proof: Proof, work: st.SearchStrategy[float]) -> Costs:
    schedule = proof.schedule
    stages = tuple(StageCost(*(draw(times) for _ in range(3))) for _ in range(schedule.num_stages))
    network = None
    if schedule.sharding.level is not Level.NONE:
        network = Network(schedule, 2, draw(times), work=draw(work))
    return Costs(stages, draw(maybe), draw(times), draw(maybe), network=network)


class Carried(SharedMachine):
    """Tells what each transfer uses, how much it has to do there, and from when to when."""

    def __init__(self, proof: Proof, costs: Costs, sharing: Sharing) -> None:
        self.begun: dict[int, tuple[float, tuple[Shared, ...]]] = {}
        self.told: list[tuple[tuple[Shared, ...], float, float, float]] = []
        super().__init__(proof.lowered, costs.duration, costs.latency, None, None, costs.transfer, sharing)

    def _put(self, transfer: Any, start: float, work: float, uses: tuple[Shared, ...]) -> None:
        super()._put(transfer, start, work, uses)
        self.begun[self._numbers] = work, uses

    def _go_on_with(self, number: int, ended: Ended) -> set[int]:
        work, uses = self.begun.pop(number)
        self.told.append((uses, work, ended.start, ended.end))
        return super()._go_on_with(number, ended)


@pytest.mark.slow
@SWEEP
@given(st.data(), st.sampled_from(PROOFS), st.sampled_from([1, 2, None]))
def test_what_is_carried_is_rate_over_time(data: st.DataObject, proof: Proof, per_host: int | None) -> None:
    """Of every message and collective: the least of its parts of the directions that it occupies, moment by moment."""
    costs = data.draw(costs_of(proof, maybe))
    machine = Carried(proof, costs, Sharing(links=SharedLinks(per_host)))
    machine.play(2)
    assert not machine.begun
    shared = {use for uses, *_ in machine.told for use in uses}
    borders = sorted({time for *_, start, end in machine.told for time in (start, end)})
    users = {
        use: {
            (a, b): sum(use in uses and start <= a and b <= end for uses, _, start, end in machine.told)
            for a, b in pairwise(borders)
        }
        for use in shared
    }
    for uses, work, start, end in machine.told:
        inside = [(a, b) for a, b in pairwise(borders) if start <= a and b <= end]
        done = sum((b - a) * min(1 / users[use][a, b] for use in uses) for a, b in inside)
        assert done == pytest.approx(work, rel=1e-9, abs=1e-9)


def intervals(proof: Proof, costs: Costs) -> list[Interval]:
    """Of a span, in one order."""
    return sorted(play(proof.lowered, costs, 3)[0].intervals)


@SWEEP
@given(st.data())
def test_links_that_carry_one_thing_at_a_time_change_nothing_to_the_last_bit(data: st.DataObject) -> None:
    """Of two ranks with a stage each, one sends activations and the other one gradients."""
    proof = PROOFS[0]
    costs = data.draw(costs_of(proof, maybe))
    assert intervals(proof, replace(costs, links=SharedLinks())) == intervals(proof, costs)


@SWEEP
@given(st.data(), st.sampled_from(PROOFS[-2:]))
def test_gathers_and_sums_alone_on_a_link_change_nothing_to_the_last_bit(data: st.DataObject, proof: Proof) -> None:
    """A rank makes one at a time."""
    costs = replace(data.draw(costs_of(proof, st.just(0.0))), transfer=0.0)
    assert intervals(proof, replace(costs, links=SharedLinks())) == intervals(proof, costs)


def test_messages_of_a_host_do_not_use_its_link() -> None:
    proof = PROOFS[1]
    costs = replace(Costs.uniform(proof.schedule, latency=0.1), transfer=2.0)
    found, alone = (simulate_schedule(proof, each, 2) for each in (replace(costs, links=SharedLinks(None)), costs))
    assert found.bubble == alone.bubble


def test_two_messages_to_a_host_divide_its_link() -> None:
    """The second begins when half of the first is there; then both go at half of the rate."""
    time = SharedTime(dict.fromkeys([("out", 0), ("out", 2), ("in", 1)], 1.0))
    time.begin((1, 1), 0.0, 1.0, (("out", 0), ("in", 1)))
    time.begin((1, 2), 0.5, 1.0, (("out", 2), ("in", 1)))
    assert time.next() == ((1, 1), 0.0, 1.5)
    assert time.next() == ((1, 2), 0.5, 2.0)
    assert time.next() is None


@pytest.mark.parametrize("per_host", [0, True, 1.5])
def test_what_is_no_number_of_ranks_on_a_link(per_host: Any) -> None:
    with pytest.raises(ConfigError, match="per_host must be a number of ranks"):
        SharedLinks(per_host)


@pytest.mark.parametrize("work", [-1, math.inf, math.nan])
def test_what_is_no_work_of_a_byte(work: float) -> None:
    with pytest.raises(ConfigError, match="work must be a finite number"):
        Network(PROOFS[-1].schedule, 2, work=work)


def test_work_of_transfers_shares_cores_with_passes() -> None:
    """At 2 cores for 2 ranks there is enough for passes, and not for transfers beside them."""
    proof = PROOFS[-2]
    network = Network(proof.schedule, 2, 100.0, work=0.5)
    costs = replace(Costs.uniform(proof.schedule), network=network)
    alone, shared, single = (
        simulate_schedule(proof, each).timeline
        for each in (costs, replace(costs, cores=SharedCores(4)), replace(costs, cores=SharedCores(2)))
    )
    assert shared.makespan == pytest.approx(alone.makespan)
    assert single.makespan > shared.makespan
    for timeline in alone, shared:
        for interval in timeline.intervals:
            if interval.what in (Op.GATHER, Op.REDUCE):
                assert interval.end - interval.start == pytest.approx((0.5 + 0.01) * 2)
