"""The actions of a span of a schedule of arrays, and what each of them waits for: no costs are a part of it.

An action begins when the one before it on its rank is done and its message has come. It is *done* a duration later, and
when there is room for what it sends; nobody sees that it has ended but has no room yet. So it waits for two messages at
most: the one that it takes, and the one that is sent `window` places before its own on the same lane. Lanes are first
in, first out, as in `penstock.schedule.compiled.event_graph_builder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from penstock.schedule.array_schedules.array_instructions import PartActions
from penstock.schedule.array_schedules.array_lowering import ArrayLowered, ArrayLowering
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.instruction_arrays import Numbers

NONE, NEVER = 0, 1
"""Actions that were done long ago, and that are never done."""
TAKEN, ROOM, TAKEN_READY, ROOM_POSTED = range(4)
"""Columns of what an action waits for; the last two only where messages take time."""


class ArraySpan:
    """The actions of a span. Every rank has its own in a row, behind one that is its start.

    Args:
        lowered: the schedule with its messages.
        batches: the most periods that are added.
        travels: whether messages take time.

    Attributes:
        starts: of each rank, the action that is its start; and one past the last place of all.
        ends: of each rank, one past the last action that has been added.
        cls: per action, 1 + its class; 0 where it does not exist in its period.
        sources: per action, those that post the message that it takes and the RECV that makes room for its own. Where
            messages take time, also those that post the RECV of the one and the SEND of the other.
        periods: how many have been added.

    Raises:
        NotCompiledError: actions of later batches stand in a period, or an epilogue.
    """

    def __init__(self, lowered: ArrayLowered, batches: int, travels: bool = False) -> None:
        lowering = lowered.lowering
        self.lowered, self._m, self._travels = lowered, lowered.schedule.microbatches, travels
        self._parts = [_PartMessages(lowering, number) for number in (0, 1)]
        self._count, self.ranks, self.periods = batches * self._m, lowered.schedule.ranks, 0
        sizes = 2 + batches * self._parts[0].lengths + self._parts[1].lengths  # the last place of each stays empty
        self.starts = 2 + np.concatenate([[0], np.cumsum(sizes)])
        self.ends = self.starts[:-1] + 1
        self._begins = self.ends
        messages = len(lowered.routes) * self._count
        if max(messages, self.starts[-1]) > np.iinfo(np.int32).max:
            raise NotCompiledError("more actions than can be numbered")
        self.cls = np.zeros(self.starts[-1], dtype=lowering.parts[0].cls.dtype)
        self.sources = np.full((self.starts[-1], 4 if travels else 2), NEVER, dtype=np.int32)
        self._posted, self._ready = (np.full(messages, NEVER, dtype=np.int32) for _ in "pr")
        lanes = batches * self._parts[0].sent + self._parts[1].sent
        self._bases = np.concatenate([[0], np.cumsum(lanes)]).tolist()
        self._order = [np.full(self._bases[-1], -1, dtype=np.int32) for _ in "sr"]  # as messages are sent, received
        self._passed = [[0] * len(lowered.lanes) for _ in "sr"]  # how many of each lane have been added
        self._without_room = np.empty((2, 0), dtype=np.int64)  # actions, and the messages that will make room
        for part, beyond in zip(lowering.parts, (self._m, 0), strict=True):
            if (part.first[~part.steps] >= beyond).any():
                raise NotCompiledError("a pass of a later batch")

    # --- parts ------------------------------------------------------------------------------------------------------

    def add_period(self) -> None:
        """Add the period of the next batch; the RECVs for it that stand in the one before are added, too."""
        self._receive(0, self.periods - 1, ahead=True)
        self._add(0, self.periods)
        self.periods += 1

    def add_epilogue(self) -> None:
        """Add what drains the pipeline behind the periods that have been added.

        Raises:
            NotCompiledError: the two ends of a lane use different orders.
        """
        self._add(1, self.periods)
        for base, sent, received in zip(self._bases[:-1], *self._passed, strict=True):
            both = slice(base, base + min(sent, received))
            if not np.array_equal(self._order[0][both], self._order[1][both]):
                raise NotCompiledError("the two ends of a lane use different orders")

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Add the epilogue, and take it away again at the end."""
        ends, begins, passed, waiting = self.ends, self._begins, [*map(list, self._passed)], self._without_room
        self.add_epilogue()
        try:
            yield
        finally:
            for before, after, order, events in zip(
                passed, self._passed, self._order, (self._posted, self._ready), strict=True
            ):
                for base, first, last in zip(self._bases[:-1], before, after, strict=True):
                    events[order[base + first : base + last]] = NEVER
            for end, beyond in zip(ends, self.ends, strict=True):
                self.sources[end:beyond] = NEVER
            self.ends, self._begins, self._passed, self._without_room = ends, begins, passed, waiting
            self.sources[waiting[0], ROOM] = NEVER

    def close(self) -> None:
        """Drop what is needed to add more."""
        del self._posted, self._ready, self._order

    def actions(self, rank: int) -> tuple[Numbers, Numbers]:
        """Return the entries of `cls` of a rank, and the microbatches of its passes, -1 for STEPs.

        Microbatches are counted from the start of the span.
        """
        period, epilogue = (part.of_rank(rank) for part in self._parts)
        found = [np.where(period.steps, -1, period.first + t * self._m) for t in range(self.periods)]
        found.append(np.where(epilogue.steps, -1, epilogue.first + self.periods * self._m))
        here = slice(self.starts[rank] + 1, self.ends[rank])
        return self.cls[here], np.concatenate(found)[: here.stop - here.start]

    def _add(self, number: int, t: int) -> None:
        """Add the actions and the RECVs of a period or an epilogue."""
        part = self._parts[number]
        self._begins, self.ends = self.ends, self.ends + part.lengths
        for rank, (begin, end) in enumerate(zip(self._begins, self.ends, strict=True)):
            own = part.of_rank(rank)
            self.cls[begin:end] = (
                own.cls + 1 if t >= part.whole_from else np.where(own.there(t, self._m), own.cls + 1, 0)
            )
            self.sources[begin:end] = NONE
        sent = [self._send(part, lane, t) for lane in range(len(self.lowered.lanes))]
        self._receive(number, t)
        for rank, begin in enumerate(self._begins):
            self._take(part.of_rank(rank), begin, t, whole=t >= part.whole_from)
        self._make_room(sent)

    def _send(self, part: _PartMessages, lane: int, t: int) -> Numbers:
        """Put the messages of a part on a lane; return the actions that send them."""
        rank = self.lowered.lanes[lane].source
        own, places = part.of_rank(rank), part.sending(lane)
        first = own.first[places] + t * self._m
        if t < part.whole_from:
            places, first = places[first >= 0], first[first >= 0]
        messages = own.sends[places] * self._count + first
        actions: Numbers = self._begins[rank] + places
        self._posted[messages] = actions
        self._pass(0, lane, messages)
        return actions

    def _receive(self, number: int, t: int, ahead: bool = False) -> None:
        """Post the RECVs of the period of batch t, or those among them that are for the next one."""
        for lane, key in enumerate(self.lowered.lanes):
            receives = self.lowered.receives[number].get(key)
            if receives is None or (ahead and not receives.ahead.any()):
                continue
            place, route, first, early = receives
            first = first + t * self._m
            there = (early == ahead) & (first >= 0)
            if not there.all():
                place, route, first = place[there], route[there], first[there]
            messages = route * self._count + first
            self._ready[messages] = self._begins[key.target] + place - 1 if t >= 0 else self.starts[key.target]
            self._pass(1, lane, messages)

    def _pass(self, end: int, lane: int, messages: Numbers) -> None:
        """Note the order of messages on a lane, as they are sent (0) or received (1)."""
        first = self._bases[lane] + self._passed[end][lane]
        if first + len(messages) > self._bases[lane + 1]:
            raise NotCompiledError("more RECVs than SENDs")
        self._order[end][first : first + len(messages)] = messages
        self._passed[end][lane] += len(messages)

    def _take(self, own: PartActions, begin: int, t: int, whole: bool) -> None:
        """Find what the actions of a rank take."""
        places = np.flatnonzero(own.takes >= 0)
        first = own.first[places] + t * self._m
        if not whole:
            places, first = places[first >= 0], first[first >= 0]
        messages = own.takes[places] * self._count + first
        self.sources[begin + places, TAKEN] = self._posted[messages]
        if self._travels:
            self.sources[begin + places, TAKEN_READY] = self._ready[messages]

    def _make_room(self, sent: list[Numbers]) -> None:
        """Find what makes room for messages that are sent, and for others that have waited for it."""
        window, waiting = self.lowered.window, self._without_room
        found = self._ready[waiting[1]]
        self.sources[waiting[0], ROOM] = found
        without = [waiting[:, found == NEVER]]
        for lane, actions in enumerate(sent):
            last = self._passed[0][lane] - window  # of those that make room
            actions = actions[max(len(actions) - max(last, 0), 0) :]
            if not len(actions):
                continue
            base = self._bases[lane] + last
            room = self._order[0][base - len(actions) : base]
            if self._travels:
                self.sources[actions, ROOM_POSTED] = self._posted[room]
            found = self._ready[room]
            self.sources[actions, ROOM] = found
            late = np.flatnonzero(found == NEVER)
            if len(late):
                without.append(np.stack([actions[late], room[late]]))
        self._without_room = np.concatenate(without, axis=1)


class _PartMessages:
    """The actions of periods or epilogues, by rank and lane.

    Attributes:
        lengths: by rank.
        sent: messages, by lane.
        whole_from: the first batch in whose period all actions exist.
    """

    def __init__(self, lowering: ArrayLowering, number: int) -> None:
        part, lanes = lowering.parts[number], lowering.lanes
        self._all, self._sending = part, lowering.sending[number]
        self.lengths = np.diff(part.starts)
        self._ranks = [lane.source for lane in lanes]
        self.sent = np.bincount(lowering.lane_of_route[part.sends[self._sending]], minlength=len(lanes))
        self._ends = np.concatenate([[0], np.cumsum(self.sent)]).tolist()
        steps, passes = (part.first[part.steps == kind].min(initial=0) for kind in (True, False))
        self.whole_from = int(max(-steps, -(passes // lowering.schedule.microbatches)))

    def of_rank(self, rank: int) -> PartActions:
        return self._all.of_rank(rank)

    def sending(self, lane: int) -> Numbers:
        """Return the positions in the program of its rank of the actions that send on a lane."""
        start = self._all.starts[self._ranks[lane]]
        places: Numbers = self._sending[self._ends[lane] : self._ends[lane + 1]] - start.astype(np.int32)
        return places
