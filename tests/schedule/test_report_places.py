"""Callers may wait for each other while they have the report of a batch: no rank waits for one that stands still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Action, Kind, Op, Unit, passes
from penstock.schedule.lowering.lower import in_one_order
from penstock.schedule.lowering.report_places import with_report_places
from penstock.schedule.lowering.send_window_search import settled
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


def lowered_of(method: str, decides: bool) -> list[Lowered]:
    found = []
    for stages, microbatches in [(2, 4), (4, 8)]:
        with suppress(ConfigError, ScheduleError):  # not for these numbers
            found.append(prove(method, stages, microbatches, decides=decides).lowered)
    if not found:
        pytest.skip("it takes no decisions")
    return found


def steps(lowered: Lowered, rank: int, batches: int) -> Iterator[Step]:
    """What a rank runs, with the reports that go before marked instructions, be they there or not."""
    program, told, found = lowered.programs[rank], 0, list[Step]()
    there = {(t, id(i)): needs for i, t, needs in span_instructions(lowered, rank, batches)}
    for t in range(-1, batches + 1):
        for instruction in program.epilogue if t == batches else program.period:
            due = range(told, told)
            if instruction.reports is not None and t >= 0:
                due = range(told, max(t - instruction.reports + 1, told))
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
    """Runs all ranks, each of which stands still at its report of a batch until all others have come to theirs."""

    def __init__(self, lowered: Lowered, programs: list[list[Step]]) -> None:
        self.lowered, self.programs = lowered, programs
        self.places, self.told = [0] * len(programs), Counter[int]()
        self.sent, self.received = set[Message](), set[Message]()
        self.sends, self.receives = Counter[LaneKey](), Counter[LaneKey]()
        self.decided = Counter[int]()
        stages = lowered.schedule.stages
        actions = [a for program in lowered.schedule.programs for a in program.period]
        self.deciders = {s for s in stages if any(a.op is Op.DECIDE and a.stage == s for a in actions)}
        self.settles = Op.VALIDATE if any(a.op is Op.VALIDATE for a in actions) else Op.STEP
        self.standing = [False] * len(programs)

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
            elif self.waits(step):
                break
            else:
                self.issue(step)
                self.places[rank] += 1
                moved = True
        return moved

    def waits(self, step: Step) -> bool:
        action = step.instruction.action
        if action.op is Op.SEND:
            lane = self.lowered.routes[step.instruction.route].lane
            return self.sends[lane] - self.receives[lane] >= self.lowered.window
        if action.op is self.settles and self.deciders:
            return self.decided[action.unit.first + step.t] < len(self.deciders)
        return any(need not in self.sent for need in step.needs)

    def issue(self, step: Step) -> None:
        action, route = step.instruction.action, step.instruction.route
        if action.op is Op.DECIDE:
            self.decided[action.unit.first + step.t] += 1
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


def standstill(lowered: Lowered, batches: int, marked: bool = True) -> Standstill:
    find = steps if marked else of_its_own_accord
    return Standstill(lowered, [list(find(lowered, rank, batches)) for rank in range(lowered.schedule.ranks)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("decides", [False, True])
def test_devices_wait_for_nothing_while_all_have_a_report(method: str, decides: bool) -> None:
    """Where they carry out messages in order: every SEND before the places has its RECV before them, and vice versa."""
    for lowered in map(in_one_order, lowered_of(method, decides)):
        batches = settled(lowered.schedule) + 3
        found = standstill(lowered, batches)
        for batch in range(batches):
            found.run(batch)
            assert found.sent == found.received


@pytest.mark.parametrize("method", METHODS)
def test_no_rank_waits_for_one_that_stands_still_before_the_decision(method: str) -> None:
    """Reports of the last stage wait for the decision of all stages, as with parallel pipelines."""
    for lowered in map(with_report_places, lowered_of(method, decides=True)):
        batches = settled(lowered.schedule) + 3
        found = standstill(lowered, batches)
        for batch in range(batches):
            found.run(batch)
            last = [s for s in lowered.schedule.stages if s.index == lowered.schedule.num_stages - 1]
            for stage in last if found.deciders else ():
                seen = found.programs[stage.rank][: found.places[stage.rank]]
                steps_ = [s for s in seen if s.instruction.action.op is found.settles]
                assert max(s.instruction.action.unit.first + s.t for s in steps_) >= batch, "the report is ready"


@pytest.mark.parametrize("method", METHODS)
def test_no_rank_waits_for_one_that_stands_still_of_its_own_accord(method: str) -> None:
    for lowered in lowered_of(method, decides=False):
        batches = settled(lowered.schedule) + 3
        found = standstill(lowered, batches, marked=False)
        for batch in range(batches - 1):
            found.run(batch)


def test_a_place_elsewhere_is_noticed() -> None:
    """Reports of rank 0 that come with its last forward hold up the decision."""
    lowered = with_report_places(lowered_of("1f1b", decides=True)[0])
    first, *others = lowered.programs
    period = [instruction._replace(reports=None) for instruction in first.period]
    last = max(i for i, instruction in enumerate(period) if instruction.action.op is Op.F)
    period[last + 1] = period[last + 1]._replace(reports=0)
    wrong = replace(lowered, programs=(first._replace(period=tuple(period)), *others))
    with pytest.raises(AssertionError, match="batch 0"):
        standstill(wrong, 3).run(0)
