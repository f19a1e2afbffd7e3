"""Where ranks hand out the report of a batch, if callers may wait for each other while they have it.

A rank that stands still there must hold up no other rank that has not come to its own place yet, and no device: one
that carries out messages in their order waits at a SEND until its RECV has been issued, and the other way round. So the
places are a cut through the programs of all ranks. It stands behind the last forward of the batch, or behind the
decision on it if reports wait for that; and if something stands before it, so does all that this waits for.

The least such cut is found by moving places on. As programs repeat themselves, one cut serves all batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, Stage, Unit, passes
from penstock.schedule.machine.collective_state import Collectives, is_collective
from penstock.schedule.machine.evaluation_without_draining_check import border_fault, first_forward
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


def with_report_places(lowered: Lowered, *, decided: bool, in_order: bool = False) -> Lowered:
    """Return a schedule whose instructions say which of them a report is handed out before.

    Args:
        lowered: with the programs of all ranks.
        decided: reports of the last stage wait for the decision of all stages.
        in_order: devices carry out messages in the order in which they are issued, so there must be one of all ranks.

    Returns:
        The same schedule, without such instructions, if ranks may hand out reports after their last forwards.
    """
    schedule = lowered.schedule
    if not (in_order or decided or schedule.directions > 1 or _ops(schedule) & {Op.DECIDE, Op.TIE}):
        return lowered  # messages alone hold up nobody
    periods = [program.rejected or program.period for program in lowered.programs]
    ready = [_settled(period, _reported(schedule, period, decided=decided)) for period in periods]
    cuts = _closed(ready, periods, _waits(lowered, periods, in_order=in_order))
    if not (in_order or decided) and all(map(_only_messages, periods, ready, cuts)):
        return lowered
    marked = (_marked(p, schedule.microbatches, *cut) for p, cut in zip(lowered.programs, cuts, strict=True))
    return replace(lowered, programs=tuple(marked))


def reports_wait(schedule: Schedule, width: int) -> bool:
    """Whether reports of the last stage wait for the decision of all stages: its copies have a part of the loss each.

    Args:
        schedule: with everything that options add to it.
        width: parallel pipelines.
    """
    ops = _ops(schedule)
    return Op.DECIDE in ops and Op.AVERAGE not in ops and (width > 1 or schedule.directions > 1)


def _ops(schedule: Schedule) -> set[Op]:
    return {action.op for program in schedule.programs for action in program.period}


def _closed(ready: Sequence[_Place], periods: Sequence[_Period], waits: Iterable[_Wait]) -> list[_Place]:
    """Move places on until everything that something before them waits for is before them, too."""
    cuts, by_rank = list(ready), defaultdict[int, list[_Wait]](list)
    for wait in waits:
        by_rank[wait.event.rank].append(wait)
    most = max(t for t, _ in ready) + 2 * len(ready) + 2  # periods by which one rank may be ahead of another
    moved = list(range(len(cuts)))  # ranks whose waits are to be looked at
    while moved:
        rank = moved.pop()
        for event, other in by_rank[rank]:
            last = event.last_before(cuts[rank])
            if other.last_before(cuts[other.rank]) < last:
                cuts[other.rank] = _settled(periods[other.rank], (last - other.lag, other.place + 1))
                assert cuts[other.rank][0] <= most, f"rank {other.rank} waits for itself"
                if other.rank not in moved:
                    moved.append(other.rank)
    return cuts


def _only_messages(period: _Period, ready: _Place, cut: _Place) -> bool:
    """Whether nothing but messages is between two places."""
    (first, start), (last, end) = ready, cut
    between = [*period[start:], *period[:end]] if last > first else period[start:end]
    return last <= first + 1 and all(instruction.route >= 0 for instruction in between)


def _reported(schedule: Schedule, period: _Period, *, decided: bool) -> _Place:
    """Where the report of batch 0 is ready."""
    m, ready = schedule.microbatches, [(0, 0)]
    settles = Op.VALIDATE if any(instruction.action.op is Op.VALIDATE for instruction in period) else Op.STEP
    waits = decided and any(instruction.action.stage.index == schedule.num_stages - 1 for instruction in period)
    for place, instruction in enumerate(period, 1):
        for p in passes(instruction.action):
            if p.op is Op.F and p.unit.kind is not Kind.EVAL:
                ready.append((-(p.unit.first // m), place))
        if waits and instruction.action.op is settles:
            ready.append((-instruction.action.unit.first, place))
    return max(ready)


def _waits(lowered: Lowered, periods: Sequence[_Period], *, in_order: bool) -> Iterator[_Wait]:
    """Yield everything that ranks wait for."""
    schedule = lowered.schedule
    yield from _collectives(schedule, periods)
    yield from _borders(lowered, periods)
    if in_order:
        yield from _pairs(schedule, periods)
    else:
        yield from _needs(schedule, periods)
        yield from _windows(lowered, periods)


def _borders(lowered: Lowered, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that all ranks wait for each other before a batch, where evaluations may be run there."""
    if border_fault(lowered) is None:
        yield from _all_of([_Event(rank, first_forward(period), 0) for rank, period in enumerate(periods)])


def _collectives(schedule: Schedule, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that updates wait for all members of a decision or of a sum of shared parameters.

    To join one waits for nobody: where a pipeline holds more than two batches, its last stage has done so two batches
    before the first one does. Members of all other collectives are taken to wait for each other.
    """
    collectives, joined = Collectives(schedule, lambda _: 0.0), defaultdict[tuple[Op, Stage], list[_Event]](list)
    for rank, period in enumerate(periods):
        for place, (action, *_) in enumerate(period):
            members = collectives.members(action.op, action.stage) if is_collective(action) else ()
            if len(members) > 1:
                joined[action.op, members[0]].append(_Event(rank, place, action.unit.first))
    for (op, _), events in joined.items():
        if op in (Op.DECIDE, Op.TIE):
            yield from (_Wait(update, event) for update in _waiting_for(op, periods) for event in events)
        else:
            yield from _all_of(events)


def _waiting_for(op: Op, periods: Sequence[_Period]) -> Iterator[_Event]:
    """Yield what waits for a decision or a sum of shared parameters: updates, or what settles whether they stay."""
    found: dict[Op, list[_Event]] = {Op.STEP: [], Op.VALIDATE: []}
    for rank, period in enumerate(periods):
        for place, (action, *_) in enumerate(period):
            if action.op in found:
                found[action.op].append(_Event(rank, place, action.unit.first))
    settles = Op.VALIDATE if op is Op.DECIDE and found[Op.VALIDATE] else Op.STEP
    yield from found[settles]


def _all_of(events: Sequence[_Event]) -> Iterator[_Wait]:
    """Yield that each waits for all of them: it does for the next one, and that for its next."""
    return (_Wait(event, events[number - 1]) for number, event in enumerate(events))


def _pairs(schedule: Schedule, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that a SEND and its RECV wait for each other."""
    messages: dict[object, list[_Event]] = defaultdict(list)
    for key, event, _ in _messages(schedule, periods):
        messages[key].append(event)
    for events in messages.values():
        yield from _all_of(events)


def _needs(schedule: Schedule, periods: Sequence[_Period]) -> Iterator[_Wait]:
    """Yield that what consumes a message waits for its SEND."""
    sends = {key: event for key, event, op in _messages(schedule, periods) if op is Op.SEND}
    for rank, period in enumerate(periods):
        for place, instruction in enumerate(period):
            for route, first in instruction.needs:  # of HOLD and FETCH, too, so what is awaited behind them is implied
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
    return tuple([i._replace(report_lag=marks[at]) if at in marks else i for at, i in enumerate(instructions)])
