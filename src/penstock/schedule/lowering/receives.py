"""Where the RECVs of a lane are posted: in the sender's order, as early as there is room."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.op_table import OPS, Lane
from penstock.schedule.ir.schedule import Action, Op, Payload, Schedule, Unit, passes
from penstock.schedule.machine.instructions import Instruction, LaneKey, Route


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
