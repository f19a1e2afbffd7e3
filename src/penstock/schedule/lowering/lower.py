"""Lowering: from passes to instructions, with the messages between ranks.

Who gives what a pass needs is asked of the registry (`penstock.schedule.ir.op_table`). Where giver and taker are on
different ranks, a SEND is placed directly after the giver and a RECV before the taker, in the order in which the lane's
messages are sent (`penstock.schedule.lowering.receives`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.gc_pause import no_collection
from penstock.schedule.ir.op_table import ACCEPTING, MOVES, OPS, PASSES, PAYLOAD_OF_FACT, Fact, gives
from penstock.schedule.ir.schedule import (
    WINDOW,
    Action,
    Kind,
    Op,
    Payload,
    Program,
    Schedule,
    Stage,
    Unit,
    format_place,
    passes,
)
from penstock.schedule.lowering.receives import LaneReceives, OrderedReceives, Receives, Use
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered, LoweredProgram, Message, Route
from penstock.schedule.transforms.post_validation import Draft, redone

Place = tuple[int, int, int]
"""A rank, a part of its program (0: period, 1: epilogue), and a position in it."""
_NEVER = sys.maxsize


def lower(schedule: Schedule, lookahead: int | None = None, window: int | None = None) -> Lowered:
    """Add the messages between ranks.

    Args:
        schedule: any schedule; it need not be legal otherwise.
        lookahead: actions by which a RECV may be posted ahead of its consumer; as many as the window if None.
        window: outstanding messages per lane and side; as the schedule says if None, and `WINDOW` where it does not.

    Raises:
        ScheduleError: a pass needs something that no pass of this or an earlier period gives, or messages on one lane
            are consumed in an order that needs more than `window` buffers.
    """
    return Lowering(schedule).at(schedule.window or WINDOW if window is None else window, lookahead)


def in_one_order(lowered: Lowered) -> Lowered:
    """Return a schedule with its RECVs placed so that all ranks issue their messages in one order.

    Raises:
        ScheduleError: there is no such order.
    """
    return Lowering(lowered.schedule).in_one_order(lowered.window)


class Lowering:
    """The messages of a schedule, found once; `at` places them for a window.

    Args:
        schedule: any schedule; it need not be legal otherwise.

    Raises:
        ScheduleError: a pass needs something that no pass of this or an earlier period gives.
    """

    @no_collection
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._redone, drafts = redone(schedule)
        self._rejects = bool(drafts)
        incoming = _Incoming(self._redone, drafts)
        uses, sends = _messages(self._redone, incoming)
        self._routes = incoming.routes
        needs: dict[tuple[int, int, int], list[Message]] = {}
        self._uses: dict[tuple[LaneKey, int], list[Use]] = {}
        self._lanes: list[tuple[LaneReceives, int]] = []  # and the part of its target's program
        for (lane, part), found in sorted(uses.items(), key=lambda item: item[0]):
            in_order = sorted(found.values())
            for use in in_order:
                needs.setdefault((lane.target, part, use.position), []).append(Message(use.route, use.unit.first))
            self._uses[lane, part] = in_order
            self._lanes.append((LaneReceives(self._redone, self._routes, lane, part, in_order), part))
        awaits = awaited(self._redone, needs)

        def piece(action: Action, rank: int, part: int, position: int) -> tuple[Instruction, ...]:
            place = rank, part, position
            own = tuple(needs.get(place, ())), False, tuple(awaits.get(place, ()))
            return Instruction(action, -1, *own), *sends.get(place, ())

        # Per rank, part and action: the action with its needs, and the SENDs behind it.
        self._pieces = [
            [[piece(a, rank, part, i) for i, a in enumerate(program[part])] for part in (0, 1)]
            for rank, program in enumerate(self._redone.programs)
        ]

    @no_collection
    def at(self, window: int, lookahead: int | None = None) -> Lowered:
        """Place the RECVs.

        Args:
            window: outstanding messages per lane and side.
            lookahead: actions by which a RECV may be posted ahead of its consumer; as many as the window if None.

        Raises:
            ScheduleError: messages on one lane are consumed in an order that needs more than `window` buffers.
        """
        ahead = window if lookahead is None else lookahead
        receives: Receives = {}
        for lane, part in self._lanes:
            for position, instruction in lane.placed(window, ahead):
                receives.setdefault((lane.key.target, part, position), []).append(instruction)
        return self._with(receives, window)

    @no_collection
    def in_one_order(self, window: int) -> Lowered:
        """Place the RECVs so that all ranks issue their messages in one order.

        Args:
            window: outstanding messages per lane and side, at the least; the order may need more.

        Raises:
            ScheduleError: there is no such order.
        """
        enough, receives = OrderedReceives(self._redone, self._routes, self._uses).placed(window)
        return self._with(receives, enough)

    def _with(self, receives: Receives, window: int) -> Lowered:
        """The schedule with these RECVs."""
        programs = []
        for rank, parts in enumerate(self._pieces):
            merged: list[list[Instruction]] = [[], []]
            for part in (0, 1):
                for position, piece in enumerate(parts[part]):
                    merged[part] += receives.get((rank, part, position), ())
                    merged[part] += piece
            period, epilogue = map(tuple, merged)
            accepted = _without_repairs(period, self._routes) if self._rejects else period
            programs.append(LoweredProgram(accepted, epilogue, period if self._rejects else ()))
        return Lowered(self.schedule, tuple(self._routes), tuple(programs), window)


class _Source(NamedTuple):
    """Where a fact comes from: a rank's period (part 0) or epilogue (part 1), the pass, and its batch offset."""

    rank: int
    part: int
    position: int
    batch: int
    action: Action


_Uses = dict[tuple[LaneKey, int], dict[tuple[int, int], Use]]  # by lane and part, then by order and route
_Sends = dict[tuple[int, int, int], list[Instruction]]  # by rank, part and position


def _messages(schedule: Schedule, incoming: _Incoming) -> tuple[_Uses, _Sends]:
    """Every message: where it is used first, and the SEND behind its giver."""
    uses: _Uses = {}
    sends: _Sends = {}
    planned: set[tuple[int, int, int, int]] = set()
    for rank, program in enumerate(schedule.programs):
        for part in (0, 1):
            for position, action in enumerate(program[part]):
                if action.op not in PASSES and action.op not in MOVES and not action.parts:
                    continue
                for index, source, lag in incoming.messages(action, part, rank, position):
                    earlier = uses.get((incoming.lanes[index], 0), {}).get((source.position, index))
                    if part and not source.part and earlier is not None and earlier.lag < lag:
                        continue  # a consumer in the last periods has it already
                    lane = uses.setdefault((incoming.lanes[index], part), {})
                    order = source.position
                    if part:  # all uses in a period have their sources in one period; those in an epilogue may not
                        order += (source.part - lag) * len(schedule.programs[source.rank].period)
                    known = lane.get((order, index))
                    if known is None or (lag, position) < (known.lag, known.position):
                        unit = source.action.unit
                        if lag:
                            unit = unit._replace(first=unit.first - lag * schedule.microbatches)
                        lane[order, index] = Use(order, index, lag, position, unit)
                    place = (source.rank, source.part, source.position)
                    if (*place, index) not in planned:
                        planned.add((*place, index))
                        send = _send(source.action, incoming.routes[index])
                        sends.setdefault(place, []).append(Instruction(send, index))
    return uses, sends


def _send(giver: Action, route: Route) -> Action:
    return Action(Op.SEND, route.source, giver.unit, None, (), route.target, route.payload)


def _without_repairs(period: tuple[Instruction, ...], routes: list[Route]) -> tuple[Instruction, ...]:
    """A period in which no version is rejected."""
    return tuple(
        i._replace(needs=tuple(need for need in i.needs if routes[need.route].payload is not Payload.REPAIR))
        for i in period
        if not i.repairs
    )


class _Incoming:
    """Finds, for each pass, the messages it needs from other ranks.

    This loop sees every pass of a large schedule, so the registry is asked once per kind of pass on a stage, with
    microbatches counted from the pass's first one, and facts are plain tuples.
    """

    def __init__(self, schedule: Schedule, drafts: frozenset[Draft]) -> None:
        self.schedule, self.m = schedule, schedule.microbatches
        self._drafts = frozenset((stage.index, stage.direction, k) for stage, k in drafts)
        self.routes: list[Route] = []
        self.lanes: list[LaneKey] = []
        self._route_index: dict[tuple[object, ...], int] = {}
        self._kinds: dict[tuple[object, ...], tuple[list[Fact], list[Fact]]] = {}
        # Who gives each fact: in the periods, by microbatch modulo m, and in the epilogues.
        self._periodic: dict[tuple[object, ...], _Source] = {}
        self._final: dict[tuple[object, ...], _Source] = {}
        for rank, program in enumerate(schedule.programs):
            for part in (0, 1):
                for position, action in enumerate(program[part]):
                    for p in passes(action):
                        self._register(p, rank, part, position)

    def _register(self, action: Action, rank: int, part: int, position: int) -> None:
        first = action.unit.first
        for what, index, direction, offset, piece in self._relative(action)[1]:
            if part:
                self._final[what, index, direction, first + offset, piece] = _Source(rank, 1, position, 0, action)
            else:
                batch, k = divmod(first + offset, self.m)
                self._periodic[what, index, direction, k, piece] = _Source(rank, 0, position, batch, action)

    def _relative(self, action: Action) -> tuple[list[Fact], list[Fact]]:
        """The facts a pass needs and gives, counted from its first microbatch."""
        op, stage, (_, count, piece, kind, _), _, _, peer, _ = action
        found = self._kinds.get((op, stage, count, piece, kind, peer))
        if found is None:
            counted = action._replace(unit=Unit(0, count, piece, kind))
            found = list(OPS[op].needs(counted, self.schedule)), list(OPS[op].gives(counted))
            self._kinds[op, stage, count, piece, kind, peer] = found
        return found

    def messages(self, action: Action, part: int, rank: int, position: int) -> Iterator[tuple[int, _Source, int]]:
        """The messages an action needs: route, source, and how many periods earlier the source stands."""
        own = set(gives(action)) if action.parts else ()
        for p in passes(action):
            for fact in self._needs(p):
                what = fact[0]
                if fact in own:
                    continue
                source, lag = self._find(fact, p, part)
                if source.rank != rank:
                    yield self._route(what, source.action, p.stage), source, lag
                elif not lag and source.part == part and source.position >= position:
                    raise self._error(fact, p, "stands later on the same rank")

    def _needs(self, action: Action) -> Iterator[tuple[str, int, int, int, int]]:
        """The facts that a pass needs, counted as it is."""
        first, drafts = action.unit.first, self._drafts
        for what, index, direction, offset, piece in self._relative(action)[0]:
            microbatch = offset + first
            drafted = bool(drafts) and (index, direction, microbatch % self.m) in drafts
            if what != "A" or drafted:
                yield what, index, direction, microbatch, piece
            if (
                drafted
                and action.op is Op.F
                and (action.stage.index, action.stage.direction, first % self.m) not in drafts
            ):
                yield "A", index, direction, microbatch, piece  # no draft of its own, so it waits for what is right

    def _route(self, what: str, giver: Action, target: Stage) -> int:
        key = (what, giver.stage, target, giver.unit.count, giver.unit.slice)
        index = self._route_index.get(key)
        if index is None:
            index = self._route_index[key] = len(self.routes)
            route = Route(PAYLOAD_OF_FACT[what], giver.stage, target, giver.unit.count, giver.unit.slice)
            self.routes.append(route)
            self.lanes.append(route.lane)
        return index

    def _find(self, fact: tuple[str, int, int, int, int], action: Action, part: int) -> tuple[_Source, int]:
        """The source of a fact and how many periods before the consumer's it stands."""
        what, index, direction, microbatch, piece = fact
        if part and fact in self._final:
            return self._final[fact], 0
        batch, k = divmod(microbatch, self.m)
        found = self._periodic.get((what, index, direction, k, piece))
        # An epilogue (part 1) follows the last period, so what it takes from a period is at least one period old.
        if found is not None and found.batch - batch >= part:
            return found, found.batch - batch
        raise self._error(fact, action, "stands nowhere" if found is None else "runs only in a later period")

    def _error(self, fact: tuple[str, int, int, int, int], action: Action, why: str) -> ScheduleError:
        what, index, direction, microbatch, _ = fact
        name = {"F": "forward", "A": "repeated forward", "G": "backward", "R": "recompute"}.get(
            what, "parked activations"
        )
        where = f"{index}.{direction}" if direction else str(index)
        return ScheduleError(
            f"{self.schedule.name}: {format_place(self.schedule, action)} needs the {name} of microbatch {microbatch} "
            f"on stage {where}, which {why}"
        )


# Finds who waits for parked activations: HOLD and FETCH take them as soon as they come, and do not wait themselves.
#
# A RETURN waits for what its HOLD has taken, and the first action on a microbatch behind its FETCH (a backward, a
# recompute, another OFFLOAD) for what that has taken. They may stand in a later period than the move, or, where the
# span ends before, in the epilogue.


def awaited(schedule: Schedule, needs: Mapping[Place, Sequence[Message]]) -> dict[Place, list[Message]]:
    """Return, by place, the messages that an action waits for because a move has taken them.

    Args:
        schedule: any schedule.
        needs: by place, the messages that actions take; those of others than HOLD and FETCH do not matter.
    """
    found: dict[Place, list[Message]] = {}
    for (rank, part, position), messages in needs.items():
        program, m = schedule.programs[rank], schedule.microbatches
        move = program[part][position]
        if move.op in ACCEPTING:
            for users_part, user, lag in _users(program, part, position, m):
                moved = [message._replace(first=message.first - lag * m) for message in messages]
                found.setdefault((rank, users_part, user), []).extend(moved)
    return found


def _users(program: Program, part: int, position: int, m: int) -> Iterator[tuple[int, int, int]]:
    """Yield who uses first what a move has taken: where no span ends before, then in the epilogues of spans that do.

    Yields:
        (part, position, periods behind that of the move).
    """
    move = program[part][position]
    later = [use for use in _uses(program[part], move, m) if use > (0, position)]
    behind, position = min(later, default=(_NEVER, 0))
    if later:
        yield part, position, behind
    ends: dict[int, int] = {}  # the first use in the epilogue of a span that ends so many periods behind
    for lag, i in () if part else _uses(program.epilogue, move, m):
        if 0 < lag <= behind:
            ends.setdefault(lag, i)
    yield from ((1, i, lag) for lag, i in ends.items())


def _uses(actions: Sequence[Action], move: Action, m: int) -> list[tuple[int, int]]:
    """List how many periods behind a move, and at which position, the users of what it has taken stand."""
    found = []
    for position, action in enumerate(actions):
        lags = [lag for p in passes(action) if (lag := _lag(move, p, m)) is not None]
        found += [(min(lags), position)] if lags else []
    return found


def _lag(move: Action, user: Action, m: int) -> int | None:
    """How many periods behind a move an action uses what that has taken; None if it does not."""
    if user.stage != move.stage or user.unit.slice != move.unit.slice or user.unit.kind is Kind.BATCH:
        return None
    if move.op is Op.HOLD:
        uses = user.op is Op.RETURN and user.peer == move.peer
    else:
        uses = user.op not in (Op.HOLD, Op.RETURN)  # which are about microbatches of the peer
    own, taken = user.unit, move.unit
    lag = taken.first // m - own.first // m  # no unit crosses the border of a batch
    first = own.first + lag * m
    overlaps = first < taken.first + taken.count and taken.first < first + own.count
    return lag if uses and overlaps and lag >= 0 else None
