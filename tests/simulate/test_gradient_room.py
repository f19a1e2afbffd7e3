"""Where full-size gradients have k places, a backward that begins another one waits for the end of a sum."""

import re
from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest

from penstock.errors import DeadlockError, ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Kind, Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.lowering.send_window_search import unlimited
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.play import play
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule

CASES = [
    ("breadth-first", 2, 4, {"chunks": 3}, "full:weights=1:gradients=1"),
    ("breadth-first", 3, 3, {"chunks": 2}, "full"),
    ("breadth-first", 1, 3, {"chunks": 5}, "full:weights=2:gradients=2:cache=direct"),
    ("breadth-first", 2, 4, {"chunks": 3, "group": 2}, "gradients:gradients=1"),
    ("interleaved", 2, 4, {"chunks": 3}, "full:weights=2:gradients=1"),
    ("interleaved", 2, 4, {"chunks": 4}, "full:weights=2:gradients=2:cache=direct"),
    ("zb-v", 3, 4, {}, "full:weights=1:gradients=1"),
    ("hanayo", 2, 4, {}, "gradients:gradients=1"),
    ("2bw", 3, 4, {}, "gradients"),
    ("1f1b", 3, 4, {}, "full:gradients=1"),
]


def earliest(schedule, costs, batches):
    """When everything happens at the earliest: a simulator of its own, from the unrolled actions alone.

    Gathers and sums of a rank occupy its network one after the other. A gradient is whole from the start of its first
    backward to the end of its sum; a backward that would make more than k waits. Messages take no time.
    """
    todo = [list(actions_of(schedule, rank, batches, older=-1)) for rank in range(schedule.ranks)]
    clock, network, found = defaultdict(float), defaultdict(float), []
    there, whole, summed = {}, {}, {}  # (F or G, stage, microbatch), (stage, version), (stage, batch) -> time
    begun, ends = defaultdict(set), defaultdict(list)

    def needed(action):
        op, (index, *_), unit = action.op, action.stage, action.unit
        if op is Op.F:
            return [("F", e.source, unit.first) for e in schedule.edges if e.target == index]
        return [("G", e.target, unit.first) for e in schedule.edges if e.source == index and op in (Op.B, Op.I)]

    def run(rank, action):
        op, stage, unit, reads = action[:4]
        time = costs.duration(action)
        if op in (Op.GATHER, Op.REDUCE):
            start = max(clock[rank], network[rank])
            network[rank] = end = start + time
            if op is Op.GATHER:
                whole[stage, reads.versions[0]] = end
            else:
                summed[stage, unit.first] = end
                begun[rank].discard((stage, unit.first))
                ends[rank].append(end)
        else:
            after = [clock[rank], *(there[fact] for fact in needed(action))]
            after += [whole.get((stage, version), 0.0) for version in (() if reads is None else reads.versions)]
            after += [summed[stage, unit.first]] if op is Op.STEP else []
            gradient = stage, unit.first // schedule.microbatches
            if op in (Op.B, Op.I, Op.W) and gradient not in begun[rank]:
                room = schedule.sharding.gradients - len(begun[rank]) - 1
                assert room >= 0
                after += sorted(ends[rank], reverse=True)[room : room + 1]  # so many sums may still be under way
                begun[rank].add(gradient)
            clock[rank] = end = max(after) + time
            start = max(after)
            if op is Op.F:
                there["F", stage.index, unit.first] = end
            if op in (Op.B, Op.I):
                there["G", stage.index, unit.first] = end
        found.append((rank, op.value, stage.index, start, end))

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(todo):
            while actions and (actions[0].unit.kind is Kind.BATCH or all(fact in there for fact in needed(actions[0]))):
                run(rank, actions.pop(0))
                progress = True
    assert not any(todo)
    return sorted(found)


@pytest.mark.parametrize(("method", "stages", "m", "options", "sharding"), CASES)
def test_everything_happens_as_early_as_the_places_allow(method, stages, m, options, sharding):
    schedule = prove(method, stages, m, options=options, sharding=sharding).schedule
    random, lowered = Random(f"{method} {sharding}"), lower(schedule, window=unlimited(schedule))
    waited = False
    for _ in range(3):
        times = [StageCost(*(random.randint(0, 8) for _ in range(4))) for _ in range(schedule.num_stages)]
        costs = Costs(tuple(times), network=Network(schedule, 2, 1 / random.randint(1, 12)))
        timeline = play(lowered, costs, 2)[0]
        drawn = [(i.rank, i.what, i.stage, i.start, i.end) for i in timeline.intervals if i.what != "SEND"]
        assert sorted(drawn) == earliest(schedule, costs, 2)
        roomy = replace(lowered, schedule=replace(schedule, sharding=schedule.sharding._replace(gradients=99)))
        waited |= play(roomy, costs, 2)[0].makespan < timeline.makespan
    assert waited == (len(schedule.on_rank(0)) > schedule.sharding.gradients)  # else none waits that no STEP holds up


def test_a_gradient_waits_for_the_sum_before_it_and_no_longer():
    """One rank, three chunks, sums of 4 and backwards of 2: with one place each waits, with two from the third on."""
    makespans = {}
    for places in (1, 2, 3):
        proof = prove("breadth-first", 1, 1, options={"chunks": 3}, sharding=f"full:weights=3:gradients={places}")
        costs = Costs((StageCost(1.0, 1.0, 1.0),) * 3, network=Network(proof.schedule, 2, 0.5))
        simulation = simulate_schedule(proof, replace(costs, network=replace(costs.network, weight_bytes=0)))
        starts = sorted(i.start for i in simulation.timeline.intervals if i.what == "B")
        makespans[places] = starts
    assert makespans == {1: [3, 9, 15], 2: [3, 5, 9], 3: [3, 5, 7]}


ALONE = """
    microbatches 1
    nodes 0@0 1@0
    sharding gradients:gradients=1
    rank 0: F0@0^t F0@1^t B0@1^t B0@0^t REDUCE[t]@1 REDUCE[t]@0 UPDATE@0 UPDATE@1
"""
TOGETHER = """
    microbatches 3
    nodes 0@0 1@1 0.1@1 1.1@0
    sharding gradients:gradients=1
    rank 0: F0@0^t F1@1.1^t B1@1.1^t REDUCE[t]@1.1 B0@0^t F2@0^t B2@0^t REDUCE[t]@0 UPDATE@0 UPDATE@1.1
    rank 1: F1@0.1^t F0@1^t B0@1^t F2@1^t B2@1^t REDUCE[t]@1 B1@0.1^t REDUCE[t]@0.1 UPDATE@0.1 UPDATE@1
"""


def schedule_of(text):
    return parse_schedule(re.sub(r"UPDATE@([\d.]+)", r"STEP[t]@\1 GATHER[t]@\1^t+1", text))


def test_waiting_for_room_is_part_of_the_proof_of_progress():
    """Rank 0 waits for a sum that rank 1 joins when it has the microbatch behind the pass that waits."""
    with pytest.raises(DeadlockError) as caught:
        check(schedule_of(TOGETHER))
    assert "rank 0 at B0@0 waits for room for a full-size gradient, 1 at once: no REDUCE of" in str(caught.value)
    assert "rank 1 at F2@1 waits for the activation of microbatch 2 from rank 0" in str(caught.value)
    with pytest.raises(DeadlockError):  # where the window is given, without times
        check(schedule_of(TOGETHER), window=8)
    for window in (None, 8):
        check(schedule_of(TOGETHER.replace("gradients=1", "gradients=2")), window=window)


def test_a_gradient_that_begins_before_the_sum_of_another_one_is_refused():
    with pytest.raises(ScheduleError, match="on rank 0 2 full-size gradients accumulate at once, .* allows 1"):
        check(schedule_of(ALONE))
    lowered = lower(schedule_of(ALONE))
    with pytest.raises(DeadlockError, match="rank 0 at B0@0 waits for room for a full-size gradient"):
        play(lowered, Costs.uniform(lowered.schedule), 1)  # of what is not proven
    check(schedule_of(ALONE.replace("gradients=1", "gradients=2")))
