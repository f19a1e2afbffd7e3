"""What holds for every schedule and all costs, however long things take."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from penstock.schedule.ir.absolute_actions import actions_of
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule
from support.drawn_proofs import maybe, positive, proofs
from support.examples import examples

SWEEP = settings(max_examples=examples(60), derandomize=True, deadline=None, database=None)


@st.composite
def runs(draw, golden=True):
    """(simulation, costs, batches) of any schedule."""
    proof = draw(proofs(golden))
    stages = [
        StageCost(draw(positive), draw(positive), draw(maybe), draw(maybe)) for _ in range(proof.schedule.num_stages)
    ]
    costs = Costs(tuple(stages), draw(maybe), draw(maybe), draw(st.floats(0.5, 1.0)))
    batches = draw(st.integers(1, 4))
    return simulate_schedule(proof, costs, batches), proof, costs, batches


@pytest.mark.slow
@SWEEP
@given(runs())
def test_a_rank_does_one_thing_at_a_time(run):
    simulation, *_ = run
    lanes = defaultdict(list)
    for i in simulation.timeline.intervals:
        assert i.start <= i.end
        if i.lane == "compute":
            lanes[i.rank].append(i)
    for row in lanes.values():  # in the order in which they were played
        assert all(before.end <= after.start for before, after in pairwise(row))


@SWEEP
@given(runs(golden=False))
def test_passes_wait_for_what_they_need(run):
    simulation, proof, costs, _ = run
    at = {(i.what, i.rank, int(i.label[1:])): i for i in simulation.timeline.intervals if i.what in ("F", "B")}
    last = proof.schedule.ranks - 1
    for (what, rank, k), i in at.items():
        if what == "F" and rank:
            assert i.start >= at["F", rank - 1, k].end + costs.latency
        if what == "B":
            assert i.start >= at["F", rank, k].end
            if rank < last:
                assert i.start >= at["B", rank + 1, k].end + costs.latency


@SWEEP
@given(runs(golden=False))
def test_updates_stand_between_the_gradients_they_use_and_the_readers_of_what_they_bear(run):
    simulation, proof, *_ = run
    m = proof.schedule.microbatches
    for rank in range(proof.schedule.ranks):
        row = [i for i in simulation.timeline.intervals if i.rank == rank]
        steps = {i.version: i for i in row if i.what == "STEP"}
        for i in row:
            if i.what == "B":
                assert i.end <= steps[int(i.label[1:]) // m + 1].start
            if i.what in ("F", "B") and i.version:
                assert i.start >= steps[i.version].end


@SWEEP
@given(runs())
def test_figures_stay_in_their_bounds(run):
    simulation, proof, *_ = run
    bubble = simulation.bubble
    assert bubble.makespan >= bubble.ideal * (1 - 1e-12)
    assert bubble.rank_span >= bubble.ideal * (1 - 1e-12)
    assert bubble.rank_span <= bubble.makespan * (1 + 1e-12)
    assert -1e-12 <= bubble.bubble < 1
    assert -1e-12 <= bubble.rank_span_bubble < 1
    assert bubble.bubble_of_ideal >= -1e-12
    # The proof's peak holds for spans of every length; this one may be too short to reach it.
    assert all(seen <= proven for seen, proven in zip(simulation.activations, proof.activations, strict=True))


@SWEEP
@given(runs())
def test_everything_runs_once(run):
    simulation, proof, _, batches = run
    wanted = sum(len(list(actions_of(proof.schedule, rank, batches))) for rank in range(proof.schedule.ranks))
    intervals = [i for i in simulation.timeline.intervals if i.what != "SEND"]
    assert len(intervals) == wanted


@SWEEP
@given(runs())
def test_busy_time_is_the_sum_of_what_a_rank_runs(run):
    simulation, proof, costs, batches = run
    beside = ("REDUCE", "AVERAGE", "GATHER")
    for rank, busy in enumerate(simulation.bubble.busy):
        work = sum(costs.duration(a) for a in actions_of(proof.schedule, rank, batches) if a.op.value not in beside)
        assert abs(busy - work) <= 1e-9 * max(1.0, work)


@SWEEP
@given(runs())
def test_activations_are_given_back(run):
    """After the drain nothing is held; in between the samples never fall below zero."""
    simulation, *_ = run
    for samples in simulation.timeline.memory.values():
        assert all(amount >= 0 for _, amount in samples)
        assert samples[-1][1] == 0
        assert [at for at, _ in samples] == sorted(at for at, _ in samples)
