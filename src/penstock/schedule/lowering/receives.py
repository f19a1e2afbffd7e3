"""Where the RECVs of a lane are posted: in the sender's order, as early as there is room."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.op_table import OPS, Lane
from penstock.schedule.ir.schedule import Action, Op, Payload, Schedule, Unit, passes
from penstock.schedule.machine.collective_state import Collectives, is_collective
from penstock.schedule.machine.default_durations import unit_time
from penstock.schedule.machine.instructions import Instruction, LaneKey, Route
from penstock.schedule.transforms.batch_ops import COLLECTIVES

Receives = dict[tuple[int, int, int], list[Instruction]]
"""By rank, part and position of the action that they stand before."""
_GRAIN = 1024  # of a forward; an action takes at least 1 and a message 1, so that nothing happens at once


class Use(NamedTuple):
    """A message as its receiver sees it; sorts in the order in which a lane's messages are sent."""

    order: int
    route: int
    lag: int  # periods between the source's and the consumer's
    position: int  # of the first consumer
    unit: Unit  # relative to the part in which it is consumed


class LaneReceives:
    """The RECVs of one lane in the period (part 0) or the epilogue (part 1) of the rank that it leads to.

    Args:
        schedule: with what follows a rejected version.
        routes: all of the schedule.
        key: the lane.
        part: of the program.
        uses: its messages, in the order in which they are sent.
    """

    def __init__(self, schedule: Schedule, routes: list[Route], key: LaneKey, part: int, uses: list[Use]) -> None:
        self.key, self._schedule, self._routes, self._part, self._uses = key, schedule, routes, part, uses

    @cached_property
    def _counted(self) -> list[int]:
        """Where the actions stand that count for the lookahead.

        Collectives do not, because they take no time, nor for other messages what follows a rejection, which is rare.
        """
        program, repairs = self._schedule.programs[self.key.target], self.key.payload is Payload.REPAIR
        return [
            i
            for i, a in enumerate(program[self._part])
            if a.parts or (OPS[a.op].lane is not Lane.COLLECTIVE and (repairs or a.op is not Op.REDO))
        ]

    @cached_property
    def _places(self) -> list[int]:
        """Where each message is used, counted in those actions."""
        return [bisect_left(self._counted, use.position) for use in self._uses]

    def placed(self, window: int, lookahead: int) -> Iterator[tuple[int, Instruction]]:
        """The RECVs, each with the position of the action that it stands before.

        Args:
            window: messages that may be posted and not used yet.
            lookahead: actions between a RECV and its consumer, at most.

        Raises:
            ScheduleError: messages are used in an order that needs more than `window` buffers.
        """
        if self.key.payload is Payload.REPAIR:
            lookahead = 0  # not before it is known that there are any
        counted, uses = self._counted, self._uses
        if self._part == 1:
            for use, post in zip(uses, self._posts(self._places, window, lookahead), strict=True):
                yield counted[max(post, 0)], self._receive(use, ahead=False)
            return
        length = len(counted)
        before = -(-window // len(uses))  # enough earlier and later periods to see the steady state
        once = [use.lag * length + place for use, place in zip(uses, self._places, strict=True)]
        positions = [position + period * length for period in range(before + 2) for position in once]
        steady = self._posts(positions, window, lookahead)[before * len(uses) : (before + 1) * len(uses)]
        placed = []
        for use, post in zip(uses, steady, strict=True):
            relative = post - (before + use.lag) * length  # to the start of the consumer's period
            early = max(relative + length, self._decided + 1)
            ahead = relative < 0 and early < length
            source = ahead - use.lag  # the sender's period, relative to the one in which the RECV stands
            placed.append((early if ahead else max(relative, 0), source, use, ahead))
        for place, _, use, ahead in sorted(placed):  # at the same place, in the order in which they are sent
            yield counted[place], self._receive(use, ahead)

    def _posts(self, positions: list[int], window: int, lookahead: int) -> list[int]:
        """Where each RECV is posted, given where the messages of the lane, in the order sent, are used."""
        if all(a < b for a, b in pairwise(positions)):  # used in the order sent
            free = [-lookahead - 1] * window + positions
            return [max(use - lookahead, before + 1) for use, before in zip(positions, free, strict=False)]
        posts = posts_out_of_order(positions, window, lookahead)
        if posts is None:
            raise ScheduleError(
                f"{self.key} needs more than {window} buffers: a message is sent too long before later ones that "
                "are used earlier; send in the order of use, or raise the window"
            )
        return posts

    @cached_property
    def _decided(self) -> int:
        """The place of the first forward of batch t: its message tells whether batch t+1 follows."""
        period = self._schedule.programs[self.key.target].period
        passes_at = (passes(period[i]) for i in self._counted)
        own = (i for i, parts in enumerate(passes_at) if any(p.op is Op.F and p.unit.first >= 0 for p in parts))
        return next(own, len(self._counted))  # a rank without one posts nothing ahead

    def _receive(self, use: Use, ahead: bool) -> Instruction:
        route, unit = self._routes[use.route], use.unit
        if ahead:
            unit = unit._replace(first=unit.first + self._schedule.microbatches)
        action = Action(Op.RECV, route.target, unit, None, (), route.source, route.payload)
        return Instruction(action, use.route, (), ahead)


def posts_out_of_order(positions: Sequence[int], window: int, lookahead: int) -> list[int] | None:
    """Return where RECVs are posted of messages that are not used in the order sent.

    Args:
        positions: where each message is used, in the order sent.
        window: messages that may be posted and not used yet.
        lookahead: actions between a RECV and its consumer, at most.

    Returns:
        None if the window is too small.
    """
    earliest = list(positions)
    for i in range(len(earliest) - 2, -1, -1):  # a message is posted no later than those sent after it
        earliest[i] = min(earliest[i], earliest[i + 1])
    posts = []
    latest = [-lookahead - 1] * window  # a heap of the latest uses so far: the top frees the next buffer
    for position, needed in zip(positions, earliest, strict=True):
        post = max(needed - lookahead, latest[0] + 1)
        if post > needed:
            return None
        heapq.heappushpop(latest, position)
        posts.append(post)
    return posts


# Where RECVs are posted so that all ranks issue their messages in one order (`penstock.schedule.machine.issue_order`).
#
# The order is that of the SENDs in an execution that repeats itself: every action of the period of batch t starts at
# start + t * period. The starts are the least that satisfy all differences that the schedule asks for (a longest path),
# and the period is the shortest for which there are any. A RECV then stands behind all actions of its rank that end
# before its message is sent, and before the next one. Fill and drain leave messages out on both sides, so the order of
# those that remain is the same.


Uses = Mapping[tuple[LaneKey, int], Sequence[Use]]
"""By lane and part of the target's program (0: period, 1: epilogue), the messages as they are sent."""


class _Difference(NamedTuple):
    """A difference: the start of `after`, `lag` periods later, is at least that of `before` plus `weight`."""

    before: int
    after: int
    weight: int
    lag: int


class OrderedReceives:
    """The RECVs of a schedule in one order of all messages.

    Args:
        schedule: with what follows a rejected version.
        routes: all of the schedule.
        uses: all messages.

    Raises:
        ScheduleError: some actions wait for each other in any order.
    """

    def __init__(self, schedule: Schedule, routes: Sequence[Route], uses: Uses) -> None:
        self._schedule, self._routes, self._uses = schedule, routes, uses
        slices = {p.unit.slice[1] for q in schedule.programs for a in q.period for p in passes(a) if p.unit.slice}
        self._grain = _GRAIN * math.lcm(*slices)
        self._base: list[int] = [0]  # the number of each rank's first action
        for program in schedule.programs:
            self._base.append(self._base[-1] + len(program.period))
        self._duration = [self._time(a) for program in schedule.programs for a in program.period]
        self._edges = [*self._in_turn(), *self._messages(), *self._joins(), *self._known()]
        loads = [sum(self._duration[a:b]) for a, b in pairwise(self._base)]
        longest = 2 * sum(self._duration) + len(self._edges)
        self._patience = longest  # rounds
        if self._starts(longest, self._edges) is None:
            raise ScheduleError(f"{schedule.name}: there is no order of all messages that every rank could keep")
        self._patience = 4 * (schedule.microbatches + schedule.ranks)  # a longer period serves as well
        low, high = max(loads) - 1, longest
        while high - low > max(low // 32, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if self._starts(middle, self._edges) else (middle, high)
        self._period = high

    def _time(self, action: Action) -> int:
        return round(unit_time(action) * self._grain) + 1

    # --- the execution that repeats itself --------------------------------------------------------------------------

    def _in_turn(self) -> Iterator[_Difference]:
        """Yield that each rank runs its actions one after another."""
        for first, end in pairwise(self._base):
            for i in range(first, end):
                last = i + 1 == end
                yield _Difference(i, first if last else i + 1, self._duration[i], int(last))

    def _periodic(self) -> Iterator[tuple[LaneKey, list[tuple[int, int, Use]]]]:
        """Yield the lanes, each with the giver and the consumer of every message of a period."""
        for (lane, part), uses in self._uses.items():
            if not part:
                source, target = self._base[lane.source], self._base[lane.target]
                yield lane, [(source + use.order, target + use.position, use) for use in uses]

    def _messages(self) -> Iterator[_Difference]:
        """Yield that what consumes a message starts after it has been sent."""
        for _, found in self._periodic():
            for giver, consumer, use in found:
                yield _Difference(giver, consumer, self._duration[giver] + 1, use.lag)

    def _joins(self) -> Iterator[_Difference]:
        """Yield that what waits for a collective starts after all ranks have joined it."""
        collectives = Collectives(self._schedule, lambda _: 0.0)
        joins: dict[tuple[Op, int, int], list[tuple[int, int]]] = defaultdict(list)
        for number, action in self._actions():
            if is_collective(action):
                joins[action.op, action.stage.index, action.stage.direction].append((number, action.unit.first))
        for number, action in self._actions():
            for op in collectives.waiting.get(action.op, ()):
                for member in collectives.members(op, action.stage) or (action.stage,):
                    for earlier in COLLECTIVES[: COLLECTIVES.index(op) + 1]:
                        for stage in collectives.members(earlier, member):
                            for join, batch in joins[earlier, stage.index, stage.direction]:
                                yield _Difference(join, number, self._duration[join], batch - action.unit.first)

    def _actions(self) -> Iterator[tuple[int, Action]]:
        return enumerate(action for program in self._schedule.programs for action in program.period)

    def _known(self) -> Iterator[_Difference]:
        """Yield that a message is sent, in the order, after its receiver knows that it will come.

        For the messages of batch t+1 that is after the first forward of batch t; for repairs, after the VALIDATE.
        """
        m = self._schedule.microbatches
        for lane, found in self._periodic():
            first, period = self._base[lane.target], self._schedule.programs[lane.target].period
            own = (i for i, a in enumerate(period) if any(p.op is Op.F and p.unit.first >= 0 for p in passes(a)))
            decided = next(own, None)
            validates = [i for i, a in enumerate(period) if a.op is Op.VALIDATE]
            for giver, _, use in found:
                ahead = 1 - use.unit.first // m - use.lag
                if decided is None:
                    yield _Difference(first, giver, -self._duration[giver], ahead - 1)
                else:
                    yield self._ends_before(first + decided, giver, ahead)
                if lane.payload is Payload.REPAIR:
                    before = [i for i in validates if i < use.position]
                    yield self._ends_before(first + (before or validates)[-1], giver, (not before) - use.lag)

    def _room(self, window: int) -> Iterator[_Difference]:
        """Yield that a message is sent, in the order, after there is a buffer for it."""
        for _, found in self._periodic():
            for place, (_, consumer, use) in enumerate(found):
                periods, later = divmod(place + window, len(found))
                yield self._ends_before(consumer, found[later][0], periods - use.lag)

    def _ends_before(self, before: int, after: int, lag: int) -> _Difference:
        return _Difference(before, after, self._duration[before] - self._duration[after] + 1, lag)

    def _starts(self, period: int, edges: Sequence[_Difference]) -> list[int] | None:
        """Return when each action of batch 0 starts at the earliest; None if no such execution is found."""
        weights = [(before, after, weight - period * lag) for before, after, weight, lag in edges]
        heaviest = [0] * len(self._duration)
        for before, _, weight in weights:
            heaviest[before] = max(heaviest[before], weight)
        limit, starts = sum(heaviest), [0] * len(self._duration)
        for _ in range(self._patience):
            moved = False
            for before, after, weight in weights:
                start = starts[before] + weight
                if start > starts[after]:
                    if start > limit:  # longer than any path without a cycle
                        return None
                    starts[after], moved = start, True
            if not moved:
                return starts
        return None

    # --- the places of the RECVs ------------------------------------------------------------------------------------

    def placed(self, window: int) -> tuple[int, Receives]:
        """Return the least window, of at least `window`, with which the order takes no longer; and the RECVs."""
        starts = None
        while starts is None:
            starts = self._starts(self._period, [*self._edges, *self._room(window)])
            window += starts is None
        ends = [start + time for start, time in zip(starts, self._duration, strict=True)]
        found: dict[tuple[int, int, int], list[tuple[tuple[int, int, int], Instruction]]] = defaultdict(list)
        posted: dict[tuple[int, int], tuple[int, int]] = {}  # route, microbatch -> of its consumer; periods from there
        m = self._schedule.microbatches
        for lane, messages in self._periodic():
            first, end = self._base[lane.target], self._base[lane.target + 1]
            for giver, _, use in messages:
                sent = ends[giver] - use.lag * self._period
                past = sent if lane.target < lane.source else sent - 1
                periods = (past - ends[end - 1]) // self._period + 1
                place = bisect_right(ends[first:end], past - periods * self._period)
                sent -= periods * self._period
                posted[use.route, use.unit.first % m] = use.unit.first, periods
                receive = self._receive(use, -periods)
                found[lane.target, 0, place].append(((sent, lane.source, use.route), receive))
        self._place_last(ends, posted, found)
        in_order = {place: [i for _, i in sorted(each)] for place, each in found.items()}
        return window, in_order

    def _place_last(
        self,
        ends: list[int],
        posted: Mapping[tuple[int, int], tuple[int, int]],
        found: dict[tuple[int, int, int], list[tuple[tuple[int, int, int], Instruction]]],
    ) -> None:
        """Place the RECVs of epilogues that no period has posted."""
        ends_last, m = self._ends_of_epilogues(ends), self._schedule.microbatches
        for (lane, part), uses in self._uses.items():
            for use in uses if part else ():
                first, periods = posted.get((use.route, use.unit.first % m), (0, 0))
                if (use.unit.first - first) // m + periods < 0:
                    continue
                sent = self._sent_last(lane, use, ends, ends_last)
                past = sent if lane.target < lane.source else sent - 1
                place = min(bisect_right(ends_last[lane.target], past), use.position)
                found[lane.target, 1, place].append(((sent, lane.source, use.route), self._receive(use, 0)))

    def _sent_last(self, lane: LaneKey, use: Use, ends: list[int], ends_last: list[list[int]]) -> int:
        """When a message of an epilogue is sent, counted from the start of the batch after the last."""
        base = self._base[lane.source]
        periods, position = divmod(use.order, self._base[lane.source + 1] - base)
        if use.order >= self._base[lane.source + 1] - base:
            return ends_last[lane.source][use.order - (self._base[lane.source + 1] - base)]
        return ends[base + position] + periods * self._period

    def _ends_of_epilogues(self, ends: list[int]) -> list[list[int]]:
        """When the actions of the epilogues end, counted from the start of the batch after the last."""
        found = []
        for program, last in zip(self._schedule.programs, self._base[1:], strict=True):
            now = ends[last - 1] - self._period
            times = []
            for action in program.epilogue:
                now += self._time(action)
                times.append(now)
            found.append(times)
        waits: dict[tuple[int, int], list[tuple[LaneKey, Use]]] = defaultdict(list)
        for (lane, part), uses in self._uses.items():
            for use in uses if part else ():
                waits[lane.target, use.position].append((lane, use))
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self._schedule.programs):
                now = ends[self._base[rank + 1] - 1] - self._period
                for position, action in enumerate(program.epilogue):
                    sent = [self._sent_last(lane, use, ends, found) + 1 for lane, use in waits[rank, position]]
                    now = max(now, *sent) if sent else now
                    now += self._time(action)
                    moved |= now != found[rank][position]
                    found[rank][position] = now
        return found

    def _receive(self, use: Use, periods: int) -> Instruction:
        """Make a RECV that stands so many periods before the consumer's."""
        route, unit, m = self._routes[use.route], use.unit, self._schedule.microbatches
        unit = unit._replace(first=unit.first + periods * m)
        action = Action(Op.RECV, route.target, unit, None, (), route.source, route.payload)
        return Instruction(action, use.route, (), unit.first >= m)
