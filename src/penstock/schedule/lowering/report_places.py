"""Where ranks hand out the report of a batch, if callers may wait for each other while they have it.

A rank that stands still there must hold up no other rank that has not come to its own place yet, and no device: one
that carries out messages in their order waits at a SEND until its RECV has been issued, and the other way round. So the
places are a cut through the programs of all ranks. It stands behind the last forward of the batch, or behind the
decision on it if reports wait for that; and if something stands before it, so does all that this waits for.

The least such cut is found by moving places on. As programs repeat themselves, one cut serves all batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, Unit, passes
from penstock.schedule.machine.collective_state import Collectives, is_collective
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered, LoweredProgram

_Period = Sequence[Instruction]
_Place = tuple[int, int]
"""A period, and how many of its instructions stand before the place."""


class _Event(NamedTuple):
    """An instruction, for one batch after the other.

    Attributes:
        rank: whose.
        place: in the period.
        lag: it is for a batch so many periods after the one in which it stands.
    """

    rank: int
    place: int
    lag: int

    def last_before(self, cut: _Place) -> int:
        """Return the last batch for which it stands before a cut."""
        period, place = cut
        return period + self.lag - (self.place >= place)


class _Wait(NamedTuple):
    """An event is held up until another one, for the same batch, has been issued."""

    event: _Event
    other: _Event


def with_report_places(lowered: Lowered, *, in_order: bool = False) -> Lowered:
    """Return a schedule whose instructions say which of them a report is handed out before.

    Args:
        lowered: with the programs of all ranks.
        in_order: devices carry out messages in the order in which they are issued, so there must be one of all ranks.
    """
    schedule = lowered.schedule
    periods = [program.rejected or program.period for program in lowered.programs]
    waits = list(_collectives(schedule, periods))
    waits += _pairs(schedule, periods) if in_order else [*_needs(schedule, periods), *_windows(lowered, periods)]
    cuts = [_settled(period, _reported(schedule, period)) for period in periods]
    moved = True
    while moved:
        moved = False
        for event, other in waits:
            last = event.last_before(cuts[event.rank])
            if other.last_before(cuts[other.rank]) < last:
                cuts[other.rank] = _settled(periods[other.rank], (last - other.lag, other.place + 1))
                moved = True
    marked = (_marked(p, schedule.microbatches, *cut) for p, cut in zip(lowered.programs, cuts, strict=True))
    return replace(lowered, programs=tuple(marked))


def _reported(schedule: Schedule, period: _Period) -> _Place:
    """Where the report of batch 0 is ready: on ranks of the last stage it may take the decision of all stages."""
    m = schedule.microbatches
    ready, decides = [(0, 0)], any(instruction.action.op is Op.DECIDE for instruction in period)
    settles = Op.VALIDATE if any(instruction.action.op is Op.VALIDATE for instruction in period) else Op.STEP
    waits = decides and any(instruction.action.stage.index == schedule.num_stages - 1 for instruction in period)
    for place, instruction in enumerate(period, 1):
        for p in passes(instruction.action):
            if p.op is Op.F and p.unit.kind is not Kind.EVAL:
                ready.append((-(p.unit.first // m), place))
        if waits and instruction.action.op is settles:
            ready.append((-instruction.action.unit.first, place))
    return max(ready)


def _collectives(schedule: Schedule, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that all members of a collective wait for each other."""
    collectives, joined = Collectives(schedule, lambda _: 0.0), defaultdict[object, list[_Event]](list)
    for rank, period in enumerate(periods):
        for place, (action, *_) in enumerate(period):
            if is_collective(action):
                event = _Event(rank, place, action.unit.first)
                joined[action.op, collectives.members(action.op, action.stage)[0]].append(event)
    for events in joined.values():
        yield from (_Wait(*pair) for pair in permutations(events, 2) if pair[0].rank != pair[1].rank)


def _pairs(schedule: Schedule, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that a SEND and its RECV wait for each other."""
    messages: dict[object, list[_Event]] = defaultdict(list)
    for key, event, _ in _messages(schedule, periods):
        messages[key].append(event)
    for events in messages.values():
        yield from (_Wait(*pair) for pair in permutations(events, 2))


def _needs(schedule: Schedule, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that what consumes a message waits for its SEND."""
    sends = {key: event for key, event, op in _messages(schedule, periods) if op is Op.SEND}
    for rank, period in enumerate(periods):
        for place, instruction in enumerate(period):
            for route, first in (*instruction.needs, *instruction.awaits):
                lag, rest = divmod(first, _stride(instruction.action.unit, schedule.microbatches))
                yield _Wait(_Event(rank, place, lag), sends[route, rest])


def _windows(lowered: Lowered, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that a SEND waits for the RECV of the message that is the window before it on its lane."""
    receives, lanes = dict[tuple[int, int], _Event](), defaultdict[LaneKey, list[tuple[tuple[int, int], _Event]]](list)
    for key, event, op in _messages(lowered.schedule, periods):
        if op is Op.RECV:
            receives[key] = event
        else:
            lanes[lowered.routes[key[0]].lane].append((key, event))
    for sends in lanes.values():
        for number, (_, event) in enumerate(sends):
            earlier, place = divmod(number - lowered.window, len(sends))  # periods, and in which place there
            key, before = sends[place]
            other = receives[key]
            yield _Wait(event, other._replace(lag=other.lag + event.lag - before.lag - earlier))


def _messages(schedule: Schedule, periods: Sequence[_Period]) -> Iterator[tuple[tuple[int, int], _Event, Op]]:
    """Yield the SENDs and RECVs with what is the same in both."""
    for rank, period in enumerate(periods):
        for place, (action, route, *_) in enumerate(period):
            if route >= 0:
                lag, rest = divmod(action.unit.first, _stride(action.unit, schedule.microbatches))
                yield (route, rest), _Event(rank, place, lag), action.op


def _stride(unit: Unit, microbatches: int) -> int:
    return 1 if unit.kind is Kind.BATCH else microbatches


def _settled(period: _Period, cut: _Place) -> _Place:
    """Move a place on to an instruction that is there whether a version is rejected or not."""
    t, place = cut
    while place == len(period) or period[place].repairs:
        t, place = (t + 1, 0) if place == len(period) else (t, place + 1)
    return t, place


def _marked(program: LoweredProgram, microbatches: int, lag: int, place: int) -> LoweredProgram:
    """Mark the place in the period, in the one with a rejected version, and where it comes while a run ends."""
    whole = program.rejected or program.period
    repairs = sum(instruction.repairs for instruction in whole[:place])
    period = _with_marks(program.period, {place - repairs: lag})
    rejected = _with_marks(program.rejected, {place: lag})
    # An epilogue has what the periods that do not come any more had for the batches before.
    known = {_kind(i.action, i.route, microbatches): (at, _lag(i.action, microbatches)) for at, i in enumerate(whole)}
    positions = []
    for action, route, *_ in program.epilogue:
        at, own = known.get(_kind(action, route, microbatches), (-1, 0))
        positions.append((_lag(action, microbatches) - own, at))
    marks = {}
    for periods in range(lag, 0, -1):  # the report of the batch so many before the end
        behind = [at for at, position in enumerate(positions, 1) if position < (lag - periods, place)]
        marks[max(behind, default=0)] = periods
    return LoweredProgram(period, _with_marks(program.epilogue, marks), rejected)


def _kind(action: Action, route: int, microbatches: int) -> tuple[object, ...]:
    """What an instruction of the epilogue has in common with that of the period."""
    unit = action.unit
    return action.op, action.stage, route, unit.kind, unit.first % _stride(unit, microbatches), unit.count, unit.slice


def _lag(action: Action, microbatches: int) -> int:
    return action.unit.first // _stride(action.unit, microbatches)


def _with_marks(instructions: Sequence[Instruction], marks: Mapping[int, int]) -> tuple[Instruction, ...]:
    return tuple([i._replace(reports=marks[at]) if at in marks else i for at, i in enumerate(instructions)])
