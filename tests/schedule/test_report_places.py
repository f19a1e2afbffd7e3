"""Callers may wait for each other while they have the report of a batch: no rank waits for one that stands still."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import extend
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Action, Kind, Op, Unit, passes
from penstock.schedule.lowering.lower import in_one_order
from penstock.schedule.lowering.report_places import with_report_places
from penstock.schedule.lowering.send_window_search import settled
from penstock.schedule.machine.evaluation_without_draining_check import border_fault, first_forward
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered, Message
from penstock.schedule.machine.issue_order import span_instructions
from penstock.schedule.methods.table import METHODS


class Step(NamedTuple):
    """An instruction in a span; before it, reports of some batches are handed out."""

    instruction: Instruction
    t: int
    needs: list[Message]
    reports: list[int]


_NOTHING = Instruction(Action(Op.RELEASE, None, Unit(0)))


def lowered_of(method: str, *, decides: bool, tied: bool = False) -> list[Lowered]:
    found = list[Lowered]()
    for stages, microbatches in [(2, 4), (4, 4), (4, 8)]:
        with suppress(ConfigError, ScheduleError):  # not for these numbers
            proof = prove(method, stages, microbatches, decides=decides)
            ends = {0, proof.schedule.num_stages - 1}
            found += [(extend(proof.schedule, decides=decides, tied=ends) if tied else proof).lowered]
    if not found:
        pytest.skip("it takes no decisions, or shares no parameters")
    return found[:2]


def steps(lowered: Lowered, rank: int, batches: int, rejected: Collection[int] = ()) -> Iterator[Step]:
    """What a rank runs, with the reports that go before marked instructions, be they there or not."""
    program, told, found = lowered.programs[rank], 0, list[Step]()
    there = {(t, id(i)): needs for i, t, needs in span_instructions(lowered, rank, batches, rejected)}
    for t in range(-1, batches + 1):
        period = program.rejected if t - 1 in rejected and t > 0 else program.period
        for instruction in program.epilogue if t == batches else period:
            due = range(told, told)
            if instruction.report_lag is not None and t >= 0:
                due = range(told, max(t - instruction.report_lag + 1, told))
                told = due.stop
            needs = there.get((t, id(instruction)))
            if needs is not None:
                found.append(Step(instruction, t, needs, list(due)))
            elif due:
                found.append(Step(_NOTHING, t, [], list(due)))
    return iter([*found, Step(_NOTHING, batches, [], list(range(told, batches)))])


def of_its_own_accord(lowered: Lowered, rank: int, batches: int) -> Iterator[Step]:
    """What a rank runs that hands out a report as soon as nobody waits for it."""
    ready, done, last = list[int](), Counter[int](), None
    wanted = sum(a.op is Op.F and a.unit.kind is not Kind.EVAL for a in lowered.schedule.programs[rank].period)
    for instruction, t, needs in span_instructions(lowered, rank, batches):
        action = instruction.action
        answers = last is not None and action.op in (Op.B, Op.I) and last.stage == action.stage
        answers &= action.stage is not None and action.stage.index == lowered.schedule.num_stages - 1
        waits = action.op in (Op.SEND, Op.RECV) or answers
        yield Step(instruction, t, needs, [] if waits else ready)
        ready = ready if waits else []
        if action.op not in (Op.SEND, Op.RECV):
            last = action if action.op is Op.F else None
        for p in passes(action):
            if p.op is Op.F and p.unit.kind is not Kind.EVAL:
                batch = t + p.unit.first // lowered.schedule.microbatches
                done[batch] += 1
                ready = [*ready, batch] if done[batch] == wanted and batch < batches - 1 else ready


class Standstill:
    """Runs all ranks, each of which stands still at its report of a batch until all others have come to theirs.

    Where evaluations may be run between two batches, all wait for each other there, too.
    """

    def __init__(self, lowered: Lowered, programs: list[list[Step]]) -> None:
        self.lowered, self.programs = lowered, programs
        self.places, self.standing = [0] * len(programs), [False] * len(programs)
        self.sent, self.received = set[Message](), set[Message]()
        self.sends, self.receives = Counter[LaneKey](), Counter[LaneKey]()
        actions = [a for program in lowered.schedule.programs for a in program.period]
        self.joint = {op: {a.stage for a in actions if a.op is op} for op in (Op.DECIDE, Op.TIE)}
        self.joined = Counter[tuple[Op, int]]()
        self.settles = Op.VALIDATE if any(a.op is Op.VALIDATE for a in actions) else Op.STEP
        self.meets = border_fault(lowered) is None
        self.begun = defaultdict[int, set[int]](set)  # batches whose border ranks have come to

    def run(self, batch: int) -> None:
        """Let all ranks come to their report of a batch."""
        self.standing, moved = [False] * len(self.programs), True
        while moved and not all(self.standing):
            moved = sum(self.advance(rank, batch) for rank in range(len(self.programs))) > 0
        assert all(self.standing), f"batch {batch}: ranks that do not come to their report: {self.standing}"

    def advance(self, rank: int, batch: int) -> bool:
        program, moved = self.programs[rank], False
        while not self.standing[rank]:
            step = program[self.places[rank]]
            if batch in step.reports:
                self.standing[rank] = moved = True
            elif self.is_at_border(rank, step) or self.waits(step):
                break
            else:
                self.issue(step)
                self.places[rank] += 1
                moved = True
        return moved

    def is_at_border(self, rank: int, step: Step) -> bool:
        period = self.lowered.programs[rank].period
        place = first_forward(period)
        if not self.meets or place == len(period) or step.instruction is not period[place]:
            return False
        self.begun[step.t].add(rank)
        return len(self.begun[step.t]) < len(self.programs)

    def waits(self, step: Step) -> bool:
        action = step.instruction.action
        if action.op is Op.SEND:
            lane = self.lowered.routes[step.instruction.route].lane
            return self.sends[lane] - self.receives[lane] >= self.lowered.window
        joint = (Op.DECIDE,) * (action.op is self.settles) + (Op.TIE,) * (action.op is Op.STEP)
        batch = action.unit.first + step.t
        return any(self.joined[op, batch] < len(self.joint[op]) for op in joint) or not self.sent.issuperset(step.needs)

    def issue(self, step: Step) -> None:
        action, route = step.instruction.action, step.instruction.route
        if action.op in self.joint:
            self.joined[action.op, action.unit.first + step.t] += 1
        if route < 0:
            return
        stride = 1 if action.unit.kind is Kind.BATCH else self.lowered.schedule.microbatches
        message, lane = Message(route, action.unit.first + step.t * stride), self.lowered.routes[route].lane
        if action.op is Op.SEND:
            self.sent.add(message)
            self.sends[lane] += 1
        else:
            self.received.add(message)
            self.receives[lane] += 1


def standstill(lowered: Lowered, batches: int, rejected: Collection[int] = ()) -> Standstill:
    marked = any(i.report_lag is not None for program in lowered.programs for i in program.period)
    ranks = range(lowered.schedule.ranks)
    if not marked:
        return Standstill(lowered, [list(of_its_own_accord(lowered, rank, batches)) for rank in ranks])
    return Standstill(lowered, [list(steps(lowered, rank, batches, rejected)) for rank in ranks])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("decides", [False, True])
def test_devices_wait_for_nothing_while_all_have_a_report(method: str, decides: bool) -> None:
    """Where they carry out messages in order: every SEND before the places has its RECV before them, and vice versa."""
    for plain in lowered_of(method, decides=decides):
        lowered = with_report_places(in_one_order(plain), decided=decides, in_order=True)
        batches = settled(lowered.schedule) + 3
        found = standstill(lowered, batches)
        for batch in range(batches):
            found.run(batch)
            assert found.sent == found.received


@pytest.mark.parametrize("method", METHODS)
def test_no_rank_waits_for_one_that_stands_still_before_the_decision(method: str) -> None:
    """Reports of the last stage wait for the decision of all stages, as with parallel pipelines."""
    for plain in lowered_of(method, decides=True):
        lowered = with_report_places(plain, decided=True)
        batches = settled(lowered.schedule) + 3
        for rejected in ((), (1,)) if lowered.programs[0].rejected else ((),):
            found = standstill(lowered, batches, rejected)
            for batch in range(batches):
                found.run(batch)
                check_decided(found, batch)


def check_decided(found: Standstill, batch: int) -> None:
    """The ranks of the last stage are behind the decision on a batch."""
    for stage in (s for s in found.lowered.schedule.stages if s.index == found.lowered.schedule.num_stages - 1):
        seen = found.programs[stage.rank][: found.places[stage.rank]]
        own = [s.instruction.action.unit.first + s.t for s in seen if s.instruction.action.op is found.settles]
        assert max(own) >= batch


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("decides", "tied"), [(False, False), (True, False), (False, True)])
def test_no_rank_waits_for_one_that_stands_still_after_its_last_forward(method: str, decides: bool, tied: bool) -> None:
    """Ranks hand reports out of their own accord, unless that would hold up a collective."""
    for plain in lowered_of(method, decides=decides, tied=tied):
        lowered = with_report_places(plain, decided=False)
        batches = settled(lowered.schedule) + 3
        found = standstill(lowered, batches)
        for batch in range(batches - 1):
            found.run(batch)


@pytest.mark.parametrize(("stages", "microbatches"), [(3, 1), (4, 2)])
@pytest.mark.parametrize(("decided", "tied"), [(False, False), (True, False), (False, True)])
def test_no_rank_waits_where_the_last_stage_joins_two_batches_ahead(
    stages: int, microbatches: int, decided: bool, tied: bool
) -> None:
    """As under 3bw with few microbatches, where there was no place while members were taken to wait for each other."""
    proof = prove("3bw", stages, microbatches, decides=not tied)
    plain = (extend(proof.schedule, decides=False, tied={0, stages - 1}) if tied else proof).lowered
    with_report_places(in_one_order(plain), decided=decided, in_order=True)  # finds places, too
    lowered = with_report_places(plain, decided=decided)
    found, batches = standstill(lowered, settled(lowered.schedule) + 3), settled(lowered.schedule) + 2
    for batch in range(batches):
        found.run(batch)
        if decided:
            check_decided(found, batch)


def test_most_reports_come_of_their_own_accord() -> None:
    """With clipping, too; not where a rank reports a batch before it has joined the decision on the one before."""
    for method, marked in [("1f1b", False), ("2bw", False), ("timeprest", True)]:
        lowered = prove(method, 4, 4, decides=True).lowered
        assert (with_report_places(lowered, decided=False) is not lowered) == marked


@pytest.mark.parametrize("method", ["zb-h2-post", "zb-auto-post"])
def test_the_place_is_the_same_where_a_version_is_rejected(method: str) -> None:
    for plain in lowered_of(method, decides=True):
        for period, _, rejected in with_report_places(plain, decided=True).programs:
            assert len(rejected) > len(period)
            (usual,), (other,) = ([i for i in each if i.report_lag is not None] for each in (period, rejected))
            assert usual == other


def test_a_place_elsewhere_is_noticed() -> None:
    """Reports of rank 0 that come with its last forward hold up the decision."""
    lowered = with_report_places(lowered_of("1f1b", decides=True)[0], decided=True)
    first, *others = lowered.programs
    period = [instruction._replace(report_lag=None) for instruction in first.period]
    last = max(i for i, instruction in enumerate(period) if instruction.action.op is Op.F)
    period[last + 1] = period[last + 1]._replace(report_lag=0)
    wrong = replace(lowered, programs=(first._replace(period=tuple(period)), *others))
    with pytest.raises(AssertionError, match="batch 0"):
        standstill(wrong, 3).run(0)
