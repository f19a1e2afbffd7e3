"""Ranks that share the cores of a host: against small steps of time, by hand, and the work that cores can do."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock.errors import ConfigError, DeadlockError
from penstock.idle_time import Idle
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.op_table import OPS, Lane
from penstock.schedule.ir.schedule import Action, Op
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.play import Machine
from penstock.schedule.machine.shared_machine import SharedCores, SharedMachine, SharedTime, Sharing
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.long_run import steady_batch
from penstock.simulate.play import play, predict
from penstock.simulate.simulate import simulate_schedule
from support.drawn_proofs import maybe, positive, proofs
from support.examples import examples
from support.schedules import make_schedule

SWEEP = settings(max_examples=examples(60), derandomize=True, deadline=None, database=None)


@st.composite
def costs_of(draw: st.DrawFn, proof: Proof, *, messages: bool) -> Costs:
    stages = [
        StageCost(*(draw(positive), draw(positive), draw(maybe), draw(maybe))) for _ in range(proof.schedule.num_stages)
    ]
    more = {name: draw(maybe) for name in ("collective", "copy", *(("send", "receive") if messages else ()))}
    return Costs(tuple(stages), draw(maybe), draw(maybe), **more)


def recorded(kind: type[Machine], proof: Proof, costs: Costs, *more: Any) -> tuple[Any, ...]:
    """What a machine tells of a span, each rank's actions in their order."""
    actions, messages = defaultdict(list), []
    machine = kind(
        proof.lowered,
        costs.duration,
        costs.latency,
        lambda rank, *told: actions[rank, told[0].op in (Op.OFFLOAD, Op.FETCH)].append(told),
        lambda *told: messages.append(told),
        costs.transfer,
        *more,
    )
    machine.play(3)
    beside = {key: sorted(told, key=repr) for key, told in actions.items()}  # collectives are told when they are known
    return beside, sorted(messages, key=repr), machine.clock


@pytest.mark.slow
@SWEEP
@given(st.data(), proofs())
def test_enough_cores_change_nothing_to_the_last_bit(data: st.DataObject, proof: Proof) -> None:
    costs, ranks = data.draw(costs_of(proof, messages=False)), proof.schedule.ranks
    shared = SharedCores(*data.draw(st.sampled_from([(ranks, None), (2, 2), (ranks + 0.5, ranks)])))
    assert shared.suffice(ranks)
    assert recorded(SharedMachine, proof, costs, Sharing(shared)) == recorded(Machine, proof, costs)
    found, alone = (simulate_schedule(proof, each, 2) for each in (replace(costs, cores=shared), costs))
    assert (found.figures(), found.timeline, found.time_split) == (alone.figures(), alone.timeline, alone.time_split)


class Told(SharedMachine):
    """Tells what each rank has to do in full speed, and from when to when it does it."""

    def __init__(self, proof: Proof, costs: Costs) -> None:
        assert costs.cores is not None
        times = costs.duration, costs.latency, self.ends, None, costs.transfer
        super().__init__(proof.lowered, *times, Sharing(costs.cores, receive=costs.receive))
        self.begun: dict[int, float] = {}
        self.told: list[tuple[int, float, float, float]] = []

    def _act(self, rank: int, action: Action, t: int, start: float, received: int) -> bool:
        assert rank not in self.begun
        self.begun[rank] = self._duration(action) + received * self._sharing.receive
        return super()._act(rank, action, t, start, received)

    def ends(self, rank: int, action: Action, _t: int, start: float, end: float) -> None:
        if action.parts or OPS[action.op].lane is Lane.COMPUTE or action.op is Op.SEND:
            self.told.append((rank, self.begun.pop(rank), start, end))
        elif action.peer is not None:  # HOLD and its kin
            self.begun.pop(rank)


@SWEEP
@given(st.data(), proofs(), st.sampled_from([0.75, 1, 1.5, 2, 3]), st.sampled_from([None, 1, 2, 3]))
def test_work_done_is_speed_over_time(data: st.DataObject, proof: Proof, cores: float, per_host: int | None) -> None:
    """Of every action, and of what it takes to send a message: its part of the cores, moment by moment."""
    shared = SharedCores(cores, per_host)
    machine = Told(proof, replace(data.draw(costs_of(proof, messages=True)), cores=shared))
    machine.play(2)
    for host in {shared.host_of(rank) for rank in range(proof.schedule.ranks)}:
        here = [each for each in machine.told if shared.host_of(each[0]) == host and each[3] > each[2]]
        times = sorted({time for *_, start, end in here for time in (start, end)})
        at_work = [(a, b, sum(start <= a and b <= end for *_, start, end in here)) for a, b in pairwise(times)]
        for _, work, start, end in here:
            done = sum((b - a) * min(1.0, cores / n) for a, b, n in at_work if start <= a and b <= end)
            assert done == pytest.approx(work, rel=1e-9, abs=1e-9)


def in_small_steps(proof: Proof, costs: Costs, batches: int, step: float) -> float:
    """When a span of a chain ends, by brute force: in each step every rank that can work does a part of it.

    Messages take no time, and there is room for all of them.
    """
    assert costs.cores is not None
    schedule, last = proof.schedule, proof.schedule.num_stages - 1
    todo = [list(actions_of(schedule, rank, batches)) for rank in range(schedule.ranks)]
    done: set[tuple[str, int, int]] = set()
    left: dict[int, float] = {}
    now = 0.0
    while any(todo):
        for rank, actions in enumerate(todo):
            while actions and rank not in left:
                action = actions[0]
                before = {"F": (action.stage.index - 1, 0), "B": (action.stage.index + 1, last)}.get(action.op.value)
                first = before is None or action.stage.index == before[1]
                if not first and (action.op.value, before[0], action.unit.first) not in done:
                    break
                left[rank] = costs.duration(action)
                if left[rank]:
                    break
                del left[rank], actions[0]
        at_work: defaultdict[int, int] = defaultdict(int)
        for rank in left:
            at_work[costs.cores.host_of(rank)] += 1
        now += step
        for rank in list(left):
            left[rank] -= step * min(1.0, costs.cores.cores / at_work[costs.cores.host_of(rank)])
            if left[rank] <= 0:
                action = todo[rank].pop(0)
                done.add((action.op.value, action.stage.index, action.unit.first))
                del left[rank]
    return now


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "2bw", "stash"])
@pytest.mark.parametrize("shared", [SharedCores(1), SharedCores(2), SharedCores(1.5, 2), SharedCores(1, 3)], ids=str)
def test_like_small_steps_of_time(method: str, shared: SharedCores) -> None:
    random = Random(f"{method} {shared}")
    proof = check(make_schedule(method, 4, 6))
    stages = tuple(StageCost(*(random.uniform(0.5, 2) for _ in range(3)), random.uniform(0, 1)) for _ in range(4))
    costs, step = Costs(stages, cores=shared), 1 / 1024
    expected = in_small_steps(proof, costs, 2, step)
    found = simulate_schedule(proof, costs, 2, window="unlimited").bubble.makespan
    assert found == pytest.approx(expected, abs=100 * step)  # each pass ends with a step
    assert simulate_schedule(proof, replace(costs, cores=None), 2).bubble.makespan < 0.9 * found


def test_two_ranks_on_one_core_by_hand() -> None:
    """F1 of the first rank and F0 of the second share the core, then B0 of the first and B1 of the second."""
    proof = check(make_schedule("gpipe", 2, 2))
    costs = Costs((StageCost(1, 1, 1),) * 2, cores=SharedCores(1))
    found = {(i.rank, i.label): (i.start, i.end) for i in simulate_schedule(proof, costs).timeline.work()}
    assert found == {
        (0, "F0"): (0, 1), (0, "F1"): (1, 3), (0, "B0"): (6, 10), (0, "B1"): (10, 12), (0, "STEP0"): (12, 12),
        (1, "F0"): (1, 3), (1, "F1"): (3, 4), (1, "B0"): (4, 6), (1, "B1"): (6, 10), (1, "STEP0"): (10, 10),
    }  # fmt: skip


def test_messages_take_their_ranks_time_by_hand() -> None:
    proof = check(make_schedule("gpipe", 2, 1))
    costs = Costs((StageCost(1, 1, 1),) * 2, latency=0.25, send=0.5, receive=0.125)
    simulation = simulate_schedule(proof, costs)
    found = [
        (i.rank, i.label, i.start, i.end)
        for i in simulation.timeline.intervals
        if i.lane == "compute" and i.end > i.start
    ]
    assert found == [
        (0, "F0", 0, 1),
        (0, "send activation 0", 1, 1.5),
        (1, "F0", 1.75, 2.875),
        (1, "B0", 2.875, 4.875),
        (1, "send gradient 0", 4.875, 5.375),
        (0, "B0", 5.625, 7.75),
    ]
    assert simulation.time_split.idle == (
        Idle(fill=3.375, communication=1.25),
        Idle(fill=1, drain=2.375, communication=1.25),
    )


def test_posting_a_message_is_communication_where_nothing_else_is_waited_for() -> None:
    proof = check(make_schedule("gpipe", 2, 3))
    split = simulate_schedule(proof, Costs((StageCost(1, 1, 1), StageCost(0, 0, 0)), send=0.5)).time_split
    assert split.idle[0].communication == pytest.approx(3 * 0.5 + 0.5)  # a gradient, too


def test_ranks_of_other_hosts_do_not_count() -> None:
    proof = check(make_schedule("1f1b", 4, 8))
    costs = Costs.uniform(proof.schedule)
    alone = simulate_schedule(proof, costs).bubble.makespan
    found = [
        simulate_schedule(proof, replace(costs, cores=SharedCores(*each))).bubble.makespan / alone
        for each in [(2, 2), (2, 3), (2, None), (1, None)]
    ]
    assert found[0] == 1 < found[1] < found[2] < found[3] == 4 * 8 * 3 / alone


def test_a_long_run_on_shared_cores() -> None:
    """Two cores do four ranks' work in twice the time where no rank waits for another one."""
    proof = check(make_schedule("2bw", 4, 8))
    costs = replace(Costs.uniform(proof.schedule, forward=1, backward_input=1, backward_weight=1), cores=SharedCores(2))
    assert steady_batch(proof.lowered, costs, 6).time == pytest.approx(2 * 8 * 3, rel=0.02)
    assert predict(proof.lowered, [costs, replace(costs, cores=None)], 3) == [
        play(proof.lowered, each, 3)[0].bubble() for each in (costs, replace(costs, cores=None))
    ]


def test_a_deadlock_is_told_on_shared_cores() -> None:
    lines = ["schedule mine", "microbatches 2", "nodes 0@0 1@1", "rank 0: F0 B0 F1 B1", "rank 1: F0 F1 B0 B1"]
    schedule = parse_schedule("\n".join(lines))
    machine = SharedMachine(lower(schedule), lambda _: 1.0, 0.0, None, None, 0.0, Sharing(SharedCores(1)))
    with pytest.raises(DeadlockError, match="2 ranks would wait for ever"):
        machine.play(1)


def test_work_of_many_ranks_on_a_core_ends_in_the_order_of_its_amount() -> None:
    time = SharedTime({("cores", 0): 2})
    for rank, work in enumerate([4.0, 1.0, 2.0, 3.0]):
        time.begin((0, rank), 0.0, work, (("cores", 0),))
    ends = [time.next() for _ in range(4)]
    assert [(each.key[1], each.end) for each in ends if each] == [(1, 2), (2, 3.5), (3, 4.5), (0, 5.5)]
    assert time.next() is None


@pytest.mark.parametrize(
    ("values", "said"),
    [((0,), "cores must be"), ((True,), "cores must be"), ((2, 0), "per_host must be"), ((2, 1.5), "per_host")],
)
def test_what_are_no_cores(values: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SharedCores(*values)
