"""Plays a span of a schedule of arrays for one or many costs: when every action is done, found for all ranks at once.

Sums and maxima are those of the object machine (`penstock.schedule.machine.play`), in the same order, so results are
equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.array_schedules.array_span import NEVER, NONE, ROOM, ROOM_POSTED, TAKEN, TAKEN_READY, ArraySpan
from penstock.schedule.compiled.evaluate import RankEnds, SpanTimes, Times
from penstock.schedule.compiled.instruction_arrays import Flags, Numbers

_TIMES = 1 << 22
"""Times that are looked at at once."""
_TURNS = 16
"""Between two looks whether any rank has gone on."""


def whole_span(lowered: ArrayLowered, batches: int, travels: bool = False) -> ArraySpan:
    """Return a span from its start to its end; arguments as of `ArraySpan`."""
    span = ArraySpan(lowered, batches, travels)
    for _ in range(batches):
        span.add_period()
    span.add_epilogue()
    span.close()
    return span


class ArrayPlay:
    """The play of a span, for k costs.

    Args:
        span: whose actions, of which more may be added between two runs.
        durations: of the classes of actions (rows) for every cost (columns).
        latency: of messages on every lane (rows) for every cost, or one row for all lanes; not zero only in a span
            whose messages take time.

    Attributes:
        heads: of each rank, the first action that is not done.
    """

    def __init__(self, span: ArraySpan, durations: Times, latency: Times) -> None:
        self.span, self._count = span, durations.shape[1]
        one = durations.shape[1] == 1  # vectors are faster than matrices of one column
        self._durations = np.concatenate([np.zeros((1, durations.shape[1])), durations])
        if one:
            self._durations = self._durations[:, 0]
        self._taken, self._room = (self._of_classes(latency, lanes) for lanes in span.lowered.lowering.lanes_of_classes)
        self._done = np.full((span.starts[-1], *self._durations.shape[1:]), np.inf)
        self._done[NONE], self._done[span.starts[:-1]] = -np.inf, 0.0
        self._done[NEVER] = np.inf
        self.heads = span.starts[:-1] + 1

    def _of_classes(self, latency: Times, lanes: Numbers) -> Times:
        """Return the latency of a message of each class of actions, behind that of actions that do not exist."""
        found = np.zeros((1 + len(lanes), self._count))
        found[1:][lanes >= 0] = latency if latency.ndim == 1 else latency[lanes[lanes >= 0]]
        return found if self._durations.ndim > 1 else found[:, 0]

    @property
    def stuck(self) -> bool:
        """Whether some rank waits for what is not there."""
        return bool((self.heads < self.span.ends).any())

    def run(self) -> None:
        """Let every rank do what it can."""
        heads, done, cls, durations = self.heads, self._done, self.span.cls, self._durations
        sources, travels = self.span.sources, self.span.sources.shape[1] > 2
        before = done[heads - 1]
        while True:
            start = heads.copy()
            for _ in range(_TURNS):
                found, here = done.take(sources.take(heads, axis=0), axis=0), cls.take(heads)
                taken, room = found[:, TAKEN], found[:, ROOM]
                if travels:
                    taken = np.maximum(taken, found[:, TAKEN_READY]) + self._taken.take(here, axis=0)
                    room = np.maximum(room, found[:, ROOM_POSTED]) + self._room.take(here, axis=0)
                now = np.maximum(before, taken)
                now += durations.take(here, axis=0)
                np.maximum(now, room, out=now)
                done[heads] = now  # infinite where it is not done
                free = np.isfinite(now if now.ndim == 1 else now[:, 0])
                np.copyto(before, now, where=free if now.ndim == 1 else free[:, None])
                heads += free
            if (heads == start).all():
                break

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Play to the end of the span as it is, and forget that again."""
        heads = self.heads.copy()
        with self.span.drained():
            self.run()
            yield
        for first, last in zip(heads, self.heads, strict=True):
            self._done[first:last] = np.inf
        self.heads = heads

    def done(self, actions: Numbers) -> Times:
        """Return when actions are done: vectors where there is one cost only."""
        return self._done[actions]

    def ends(self) -> RankEnds:
        """Return when the ranks are done, and whether anything has waited for room, or for a RECV."""
        count, total = self._count, int(self.span.starts[-1])
        held_up, size = np.zeros(count, dtype=bool), max(_TIMES // count, 1)
        for first in range(NEVER + 1, total, size):
            places = slice(first, min(first + size, total))
            held_up |= self._held_up(places, self._intervals(places)[1])
        return RankEnds(self._clocks(), held_up)

    def times(self) -> SpanTimes:
        """Return the times of the span."""
        works = np.concatenate([[False], self.span.lowered.lowering.classes.works()])
        count = self._count
        first, last, busy = (np.zeros((self.span.ranks, count)) for _ in range(3))
        held_up = np.zeros(count, dtype=bool)
        for rank in range(self.span.ranks):
            places = self._of_rank(rank)
            begin, end = self._intervals(places)
            held_up |= self._held_up(places, end)
            work = works[self.span.cls[places]]
            if not work.all():
                begin, end = begin[work], end[work]
            first[rank], last[rank] = begin.min(axis=0, initial=np.inf), end.max(axis=0, initial=0.0)
            if len(begin):
                busy[rank] = np.cumsum(np.subtract(end, begin, out=end), axis=0)[-1]
        return SpanTimes(self._clocks(), first, last, busy, held_up)

    def _clocks(self) -> Times:
        clocks: Times = self._done[self.heads - 1].reshape(-1, self._count)
        return clocks

    def _held_up(self, places: slice, end: Times) -> Flags:
        """Return for which costs some action has waited for room when it ended, or its message for a RECV."""
        held_up: Flags = np.atleast_1d((self._done[places] > end).any(axis=0))
        if self._taken.any():
            sources = self.span.sources[places]
            late = self._done[sources[:, TAKEN_READY]] > self._done[sources[:, TAKEN]]
            held_up |= (late & (self._taken.take(self.span.cls[places], axis=0) != 0)).any(axis=0)
        return held_up

    def _of_rank(self, rank: int) -> slice:
        return slice(self.span.starts[rank] + 1, self.span.ends[rank])

    def intervals(self, rank: int) -> tuple[Times, Times]:
        """Return when the actions of a rank begin and end."""
        return self._intervals(self._of_rank(rank))

    def _intervals(self, places: slice) -> tuple[Times, Times]:
        """Return when actions begin and end; they are done when there is room for what they send, too."""
        sources = self.span.sources[places]
        begin = self._done.take(sources[:, TAKEN], axis=0)
        if sources.shape[1] > 2:
            np.maximum(begin, self._done.take(sources[:, TAKEN_READY], axis=0), out=begin)
            begin += self._taken.take(self.span.cls[places], axis=0)
        np.maximum(begin, self._done[places.start - 1 : places.stop - 1], out=begin)
        end = self._durations.take(self.span.cls[places], axis=0)
        end += begin
        return begin, end
