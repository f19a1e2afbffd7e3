"""Lowering: from passes to instructions, with the messages between ranks.

Who gives what a pass needs is asked of the registry (`penstock.schedule.ir.ops`). Where giver and taker are on
different ranks, a SEND is placed directly after the giver and a RECV a few actions before the taker, in the order in
which the lane's messages are sent.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.gc_pause import no_collection
from penstock.schedule.ir.ops import MOVES, OPS, PASSES, PAYLOAD_OF_FACT, Fact, Lane, gives
from penstock.schedule.ir.schedule import Action, Op, Payload, Schedule, Stage, Unit, passes
from penstock.schedule.machine.instructions import (
    LOOKAHEAD,
    Instruction,
    LaneKey,
    Lowered,
    LoweredProgram,
    Message,
    Route,
)
from penstock.schedule.transforms.post_validation import Draft, redone


class _Source(NamedTuple):
    """Where a fact comes from: a rank's period (part 0) or epilogue (part 1), the pass, and its batch offset."""

    rank: int
    part: int
    position: int
    batch: int
    action: Action


class _Use(NamedTuple):
    """A message as its receiver sees it; sorts in the order in which a lane's messages are sent."""

    order: int
    route: int
    lag: int  # periods between the source's and the consumer's
    position: int  # of the first consumer
    unit: Unit  # relative to the part in which it is consumed


@dataclass
class _Plan:
    """What lowering adds to one part of one rank's program, by position."""

    receives: dict[int, list[Instruction]] = field(default_factory=dict)
    sends: dict[int, list[Instruction]] = field(default_factory=dict)
    needs: dict[int, list[Message]] = field(default_factory=dict)
    sent: set[tuple[int, int]] = field(default_factory=set)  # (position, route)


@no_collection
def lower(schedule: Schedule, lookahead: int = LOOKAHEAD, window: int | None = None) -> Lowered:
    """Add the messages between ranks.

    Args:
        schedule: any schedule; it need not be legal otherwise.
        lookahead: actions by which a RECV may be posted ahead of its consumer.
        window: outstanding messages per lane and side; as the schedule says if None.

    Raises:
        ScheduleError: a pass needs something that no pass of this or an earlier period gives, or messages on one lane
            are consumed in an order that needs more than `window` buffers.
    """
    window, given = schedule.window if window is None else window, schedule
    schedule, drafts = redone(given)
    plans = [(_Plan(), _Plan()) for _ in schedule.programs]
    uses: dict[tuple[LaneKey, int], dict[tuple[int, int], _Use]] = {}
    incoming = _Incoming(schedule, drafts)
    for rank, program in enumerate(schedule.programs):
        for part in (0, 1):
            for position, action in enumerate(program[part]):
                if action.op not in PASSES and action.op not in MOVES and not action.parts:
                    continue
                for route, source, lag in incoming.messages(action, part, rank, position):
                    earlier = uses.get((incoming.lanes[route], 0), {}).get((source.position, route))
                    if part and not source.part and earlier is not None and earlier.lag < lag:
                        continue  # a consumer in the last periods has it already
                    lane = uses.setdefault((incoming.lanes[route], part), {})
                    order = source.position
                    if part:  # all uses in a period have their sources in one period; those in an epilogue may not
                        order += (source.part - lag) * len(schedule.programs[source.rank].period)
                    known = lane.get((order, route))
                    if known is None or (lag, position) < (known.lag, known.position):
                        unit = source.action.unit
                        if lag:
                            unit = unit._replace(first=unit.first - lag * schedule.microbatches)
                        lane[order, route] = _Use(order, route, lag, position, unit)
                    _plan_send(plans[source.rank][source.part], incoming.routes[route], route, source)
    for (lane_key, part), lane in sorted(uses.items(), key=lambda item: item[0]):
        ahead = 0 if lane_key.payload is Payload.REPAIR else lookahead  # not before it is known that there are any
        place = _RecvPlacing(schedule, incoming.routes, ahead, window, lane_key)
        place.receives(sorted(lane.values()), plans[lane_key.target][part], part)
    programs = []
    for program, plan in zip(schedule.programs, plans, strict=True):
        period, epilogue = (_merge(program[part], plan[part]) for part in (0, 1))
        accepted = _without_repairs(period, incoming.routes) if drafts else period
        programs.append(LoweredProgram(accepted, epilogue, period if drafts else ()))
    return Lowered(given, tuple(incoming.routes), tuple(programs), window)


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
            f"{self.schedule.name}: {action} on rank {action.stage.rank} needs the {name} of microbatch {microbatch} "
            f"on "
            f"stage {where}, which {why}"
        )


def _plan_send(plan: _Plan, route: Route, index: int, source: _Source) -> None:
    key = (source.position, index)
    if key not in plan.sent:
        plan.sent.add(key)
        action = Action(Op.SEND, route.source, source.action.unit, None, (), route.target, route.payload)
        plan.sends.setdefault(source.position, []).append(Instruction(action, index))


@dataclass
class _RecvPlacing:
    """Chooses where the RECVs of one lane are posted: in the sender's order, a little ahead of their use."""

    schedule: Schedule
    routes: list[Route]
    lookahead: int
    window: int
    lane: LaneKey

    def receives(self, uses: list[_Use], plan: _Plan, part: int) -> None:
        """Add the RECVs of a lane to the plan of its target."""
        for use in uses:
            plan.needs.setdefault(use.position, []).append(Message(use.route, use.unit.first))
        counted = self._counted(part)
        places = [bisect_left(counted, use.position) for use in uses]
        if part == 1:
            for use, post in zip(uses, self._posts(places), strict=True):
                self._add(plan, use, counted[max(post, 0)], ahead=False)
            return
        length = len(counted)
        before = -(-self.window // len(uses))  # enough earlier and later periods to see the steady state
        once = [use.lag * length + place for use, place in zip(uses, places, strict=True)]
        positions = [position + period * length for period in range(before + 2) for position in once]
        steady = self._posts(positions)[before * len(uses) : (before + 1) * len(uses)]
        gate = self._decided_after(counted)
        placed = []
        for use, post in zip(uses, steady, strict=True):
            relative = post - (before + use.lag) * length  # to the start of the consumer's period
            early = max(relative + length, gate + 1)
            ahead = relative < 0 and early < length
            source = ahead - use.lag  # the sender's period, relative to the one in which the RECV stands
            placed.append((early if ahead else max(relative, 0), source, use, ahead))
        for place, _, use, ahead in sorted(placed):  # at the same place, in the order in which they are sent
            self._add(plan, use, counted[place], ahead)

    def _counted(self, part: int) -> list[int]:
        """Where the actions stand that count for the lookahead.

        Collectives do not, because they take no time, nor for other messages what follows a rejection, which is rare.
        """
        program, repairs = self.schedule.programs[self.lane.target], self.lane.payload is Payload.REPAIR
        return [
            i
            for i, a in enumerate(program[part])
            if a.parts or (OPS[a.op].lane is not Lane.COLLECTIVE and (repairs or a.op is not Op.REDO))
        ]

    def _posts(self, positions: list[int]) -> list[int]:
        """Where each RECV is posted, given where the messages of a lane, in the order sent, are consumed."""
        ahead, window = self.lookahead, self.window
        if all(a < b for a, b in pairwise(positions)):  # used in the order sent
            free = [-ahead - 1] * window + positions
            return [max(use - ahead, before + 1) for use, before in zip(positions, free, strict=False)]
        earliest = list(positions)
        for i in range(len(earliest) - 2, -1, -1):  # a message is posted no later than those sent after it
            earliest[i] = min(earliest[i], earliest[i + 1])
        posts = []
        latest = [-ahead - 1] * window  # a heap of the latest uses so far: the top frees the next buffer
        for position, needed in zip(positions, earliest, strict=True):
            post = max(needed - ahead, latest[0] + 1)
            if post > needed:
                raise ScheduleError(
                    f"{self.lane} needs more than {window} buffers: a message is sent too long before later ones that "
                    "are used earlier; send in the order of use, or raise the window"
                )
            heapq.heappushpop(latest, position)
            posts.append(post)
        return posts

    def _decided_after(self, counted: list[int]) -> int:
        """The place of the first forward of batch t: its message tells whether batch t+1 follows."""
        period = self.schedule.programs[self.lane.target].period
        passes_at = (passes(period[i]) for i in counted)
        own = (i for i, parts in enumerate(passes_at) if any(p.op is Op.F and p.unit.first >= 0 for p in parts))
        return next(own, len(counted))  # a rank without one posts nothing ahead

    def _add(self, plan: _Plan, use: _Use, position: int, ahead: bool) -> None:
        route, unit = self.routes[use.route], use.unit
        if ahead:
            unit = unit._replace(first=unit.first + self.schedule.microbatches)
        action = Action(Op.RECV, route.target, unit, None, (), route.source, route.payload)
        plan.receives.setdefault(position, []).append(Instruction(action, use.route, (), ahead))


def _merge(actions: tuple[Action, ...], plan: _Plan) -> tuple[Instruction, ...]:
    merged: list[Instruction] = []
    for position, action in enumerate(actions):
        merged += plan.receives.get(position, ())
        merged.append(Instruction(action, -1, tuple(plan.needs.get(position, ()))))
        merged += plan.sends.get(position, ())
    return tuple(merged)
