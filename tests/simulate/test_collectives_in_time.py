"""Collectives in a played schedule: they begin when all have joined, block nobody, and their readers wait."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

GOLDEN = Path(__file__).parents[1] / "golden"


def run(text, collective, batches=1, stages=None, **costs):
    schedule = parse_schedule(text)
    stages = stages or Costs.uniform(schedule, **costs).stages
    return simulate_schedule(schedule, Costs(tuple(stages), collective=collective), batches)


def intervals(simulation, what):
    return [(i.rank, i.label, i.start, i.end) for i in simulation.timeline.intervals if i.what == what]


def test_chimera_reduces_when_both_replicas_have_joined():
    """F = 1, B = 2, a reduction of 4: every rank ends its passes at 16 and then reduces two stages one after the other.

    Rank 0 joins stage 3 at 13 (its last backward there), rank 3 at 12; the reduction runs beside the passes that
    follow.
    """
    text = (GOLDEN / "chimera.txt").read_text()
    free, slow = run(text, 0), run(text, 4)
    assert free.bubble.makespan == 16
    for simulation, time in ((free, 0), (slow, 4)):
        joined = {}
        for i in simulation.timeline.intervals:
            if i.what == "B":
                joined[i.stage] = max(joined.get(i.stage, 0), i.end)
        for i in simulation.timeline.intervals:
            if i.what == "REDUCE":
                assert i.start >= joined[i.stage]
                assert i.end == i.start + time
        starts = {(i.stage, i.start, i.end) for i in simulation.timeline.intervals if i.what == "REDUCE"}
        assert len(starts) == 4  # both members see one interval


def test_the_last_member_to_join_starts_a_reduction():
    """Two directions of one stage, with two microbatches and one: the second is ready at 3 and waits until 6."""
    text = """
        microbatches 3
        nodes 0@0 0.1@1
        rank 0: F0^t B0^t F1^t B1^t REDUCE[t] STEP[t]
        rank 1: F2^t B2^t REDUCE[t] STEP[t]
    """
    result = run(text, 4, step=1.0)
    assert sorted(intervals(result, "REDUCE")) == [(0, "REDUCE0", 6, 10), (1, "REDUCE0", 6, 10)]
    assert sorted(intervals(result, "STEP")) == [(0, "STEP0", 10, 11), (1, "STEP0", 10, 11)]


def test_an_update_waits_for_its_reduction_and_passes_of_other_nodes_do_not():
    """One rank, two chunks: while chunk 1 reduces for 10, chunk 0 runs its backwards; then its own update waits."""
    text = """
        microbatches 2
        nodes 0@0 1@0
        rank 0: F0@0^t F1@0^t F0@1^t F1@1^t B0@1^t B1@1^t REDUCE[t]@1 B0@0^t B1@0^t STEP[t]@1 REDUCE[t]@0 STEP[t]@0
    """
    result = run(text, 10, stages=[StageCost(1, 1, 1, 1)] * 2)
    assert intervals(result, "REDUCE") == [(0, "REDUCE0", 8, 18), (0, "REDUCE0", 19, 29)]
    assert intervals(result, "STEP") == [(0, "STEP0", 18, 19), (0, "STEP0", 29, 30)]


def test_gathered_weights_are_waited_for():
    """Breadth first on one rank: each gather of 3 stands in front of the passes that read it."""
    text = """
        microbatches 2
        nodes 0@0
        sharding full
        rank 0: GATHER[t]^t F0^t F1^t B0^t B1^t RELEASE[t]^t REDUCE[t] STEP[t]
    """
    result = run(text, 3, batches=2)
    assert intervals(result, "GATHER") == [(0, "GATHER0", 0, 3), (0, "GATHER1", 12, 15)]
    assert [start for _, _, start, _ in intervals(result, "F")] == [3, 4, 15, 16]
    assert result.bubble.busy == (12,)  # a gather is no work of the compute lane


def test_an_average_is_waited_for_by_the_next_forward_only_in_its_batches():
    result = run((GOLDEN / "periodic_averaging.txt").read_text(), 5, batches=5)
    for rank in (0, 1):
        assert [label for at, label, *_ in intervals(result, "AVERAGE") if at == rank] == ["AVERAGE3"]
    (end,) = {end for rank, _, _, end in intervals(result, "AVERAGE") if rank == 0}
    first = next(start for rank, label, start, _ in intervals(result, "F") if (rank, label) == (0, "F8"))
    assert first >= end


def test_reductions_of_one_cut_do_not_overtake_each_other():
    """A collective has one first-in first-out lane per group and operation.

    Here each reduction takes longer than a batch. If two of them ran at once, a batch would seem to cost half of it.
    """
    text = """
        rule double-buffer
        microbatches 2
        nodes 0@0
        rank 0: STEP[t-2] F0^t-1 B0^t-1 F1^t-1 B1^t-1 REDUCE[t]
        drain 0: STEP[t-2] STEP[t-1]
    """
    result = run(text, 10, batches=6)
    lane = [(start, end) for _, _, start, end in intervals(result, "REDUCE")]
    assert all(before[1] <= after[0] for before, after in pairwise(lane))
    assert result.bubble.makespan >= 6 + 6 * 10


@pytest.mark.parametrize("batches", [1, 3])
def test_labels_count_through_the_span(batches):
    schedule = make_schedule("2bw", 2, 2)
    timeline = simulate_schedule(check(schedule), Costs.uniform(schedule), batches).timeline
    for rank in (0, 1):
        labels = [i.label for i in timeline.work(rank)]
        assert labels == [f"{a.op}{a.unit.first}" for a in actions_of(schedule, rank, batches)]
    for i in timeline.work():
        number = int(i.label.removeprefix("STEP").strip("FB"))
        assert i.batch == (number if i.what == "STEP" else number // 2)


def test_labels_of_other_units():
    def labels(name, what):
        schedule = parse_schedule((GOLDEN / f"{name}.txt").read_text())
        return [
            i.label
            for i in simulate_schedule(schedule, Costs.uniform(schedule), 2).timeline.intervals
            if i.what == what
        ]

    assert {"F1:1/2", "F3:0/2"} <= set(labels("seq1f1b", "F"))
    assert set(labels("nf1b", "B")) == {"B0..3", "B4..7"}
    assert labels("evaluation", "F")[0] == "Fe0"
    assert "F3+B1" in labels("dualpipe_v", "FUSED")
    assert {"activation 1:1/2", "gradient 3:0/2"} <= set(labels("seq1f1b", "SEND"))
    assert {"activation 5", "gradient 4..7"} <= set(labels("nf1b", "SEND"))


@pytest.mark.parametrize("method", ["chimera", "dualpipe"])
def test_passes_wait_for_the_gather_that_all_copies_of_a_stage_join(method):
    proof = prove(method, 4, 8, sharding="gradients")
    schedule, random = proof.schedule, Random(method)
    times = tuple(StageCost(*(random.randint(1, 8) for _ in range(3))) for _ in range(schedule.num_stages))
    simulation = simulate_schedule(proof, Costs(times, network=Network(schedule, 2, 0.2)), 3)
    places = {i: (i.stage, i.direction, i.rank) for i in simulation.timeline.intervals}
    whole = {(place, i.version): i.end for i, place in places.items() if i.what == "GATHER"}
    readers = [i for i in places if i.what in {"F", "B", "I", "W"} and i.version > 0]
    assert len(readers) >= 2 * 2 * 8 * schedule.num_stages / 2
    assert [i for i in readers if i.start < whole[places[i], i.version]] == []
