"""Causes of idle time: every idle moment of a timeline, simulated or measured, is assigned exactly one cause.

A *section* lies between two moments at which the pipeline is empty: no microbatch is between its first pass anywhere
and its last. So a method that flushes has a section per batch, and one that does not has one per span. The cause of an
idle moment is the first of these that holds:

    data           the rank reads samples
    communication  the rank posts a message; or a message is in transit that the rank waits for, or that its peer has to
                   receive before the rank may post the next one
    drain          the rank has finished its last pass of the section and other ranks have not (after the last section,
                   until the end of the timeline); or it waits for a gradient and has no forward left to run
    control        the rank waits for other ranks in a sum of gradients or a global decision
    copy           the rank waits for nothing but what is on its way back from the memory of the host
    fill           the rank has not begun its first pass of the section; or it waits for its first gradient
    imbalance      the rank waits for a peer that is still working, or that is waiting itself
    engine         the rank waits for nothing recorded: Python between actions, the caller's loop, or the turns of other
                   ranks where one process runs them all

Waits for the first gradient count as fill because the first microbatch has to pass through all stages and back. Where
forwards and backwards alternate, the last gradients arrive one forward later than the rank could use them, because it
has no forward of its own left; those waits count as drain. So equal stages whose messages take no time have no
imbalance, in any order.

A measured timeline contains its waits. A simulated one only says when a rank posts a message, if that takes time. The
others are derived: before a pass the rank waits for what another rank did last for the same microbatch, and before an
update for its collectives; if a copy from the host ends later, for that as soon as the message has come.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from penstock.timeline import Interval, Timeline, Waiting

_BACKWARD = ("B", "I")
_SENT = ("F", *_BACKWARD)  # passes whose results travel
_TAKEN = ("FETCH", "SWAPIN")  # copies that something waits for


class Idle(NamedTuple):
    """Idle time by cause, in the unit of the timeline; the module defines the causes."""

    fill: float = 0.0
    drain: float = 0.0
    imbalance: float = 0.0
    communication: float = 0.0
    data: float = 0.0
    control: float = 0.0
    copy: float = 0.0
    engine: float = 0.0


@dataclass(frozen=True)
class TimeSplit:
    """How long every rank works, and why it stands idle the rest of the time.

    Attributes:
        makespan: time from the first start to the last end of work on any rank.
        busy: working time per rank.
        idle: per rank, the idle time of each cause; with the working time it adds up to the makespan.
        partial: whether only the end of the run is covered, because the timeline before it was dropped.
    """

    makespan: float
    busy: tuple[float, ...]
    idle: tuple[Idle, ...]
    partial: bool = False

    def __repr__(self) -> str:
        """Return the shares of all ranks."""
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares().items() if share >= 0.0005)
        return f"<TimeSplit of {self.makespan:.4g}: {shares}>"

    def shares(self, rank: int | None = None) -> dict[str, float]:
        """Return work and idle time by cause as fractions of the time of one rank or of all; the idle ones sum to the
        bubble."""
        ranks = range(len(self.busy)) if rank is None else (rank,)
        times = zip(*((self.busy[r], *self.idle[r]) for r in ranks), strict=True)
        total = len(ranks) * self.makespan or 1.0
        return {name: sum(of_ranks) / total for name, of_ranks in zip(("work", *Idle._fields), times, strict=True)}


def split_time(timeline: Timeline) -> TimeSplit:
    """Split the time of every rank into work, and idle time by cause: where the time went."""
    bubble, facts, idle = timeline.bubble(), _Facts(timeline), []
    for rank in range(timeline.ranks):
        causes = dict.fromkeys(Idle._fields, 0.0)
        for gap in facts.gaps(rank):
            for cause, time in gap.split():
                causes[cause] += time
        idle.append(Idle(**causes))
    return TimeSplit(bubble.makespan, bubble.busy, tuple(idle), timeline.since > 0)


@dataclass
class _Section:
    """The passes between two moments at which the pipeline is empty.

    Attributes:
        start, end: first start and last end of its passes on any rank.
        forwards: the number of forwards per rank.
        alternates: True if some rank runs a forward after a backward.
    """

    start: float
    end: float
    forwards: Counter[int] = field(default_factory=Counter)
    alternates: bool = False


@dataclass
class _Gap:
    """An idle interval of a rank between two of its actions.

    Attributes:
        start, end: times.
        before, after: the sections of the passes before and after it.
        first: True if the gap ends with the rank's first backward of the section.
        spent: True if the rank has no forwards left in the section.
        waits: the waits of the rank that overlap the gap.
        made: the time at which the message that the rank waits for had been produced.
        peers: the work of the ranks that have not yet received a message of this rank.
    """

    start: float
    end: float
    before: _Section | None
    after: _Section | None
    first: bool
    spent: bool
    waits: Sequence[Interval] = ()
    made: float = math.inf
    peers: Sequence[Interval] = ()

    def __post_init__(self) -> None:
        self._empty = -math.inf if self.before is None else self.before.end
        self._begun = -math.inf if self.after is None else self.after.start

    def split(self) -> Iterator[tuple[str, float]]:
        """Yield (cause, time) for each part of the gap that has one cause."""
        changes = {self.start, self.end, self.made, self._empty, self._begun}
        changes.update(time for i in (*self.waits, *self.peers) for time in (i.start, i.end))
        for start, end in pairwise(sorted(time for time in changes if self.start <= time <= self.end)):
            yield self._cause(start), end - start

    def _cause(self, time: float) -> str:
        """Return the cause of the idle time from `time` to the next change."""
        wait = next((w.what for w in self.waits if w.start <= time < w.end), "")
        if wait == Waiting.DATA:
            return "data"
        if wait == Waiting.POST or (wait == Waiting.MESSAGE and time >= self.made):
            return "communication"
        border = self.before is not self.after
        if border and time < self._empty:
            return "drain"
        if wait in (Waiting.CONTROL, Waiting.COPY):
            return "control" if wait == Waiting.CONTROL else "copy"
        if border and self.after is None:
            return "drain"
        if border:
            return "fill" if wait == Waiting.MESSAGE or time >= self._begun else "engine"
        if wait == Waiting.ROOM and not any(i.start <= time < i.end for i in self.peers):
            return "communication"
        if wait not in (Waiting.MESSAGE, Waiting.ROOM):
            return "engine"
        return "fill" if self.first else "drain" if self.spent else "imbalance"


class _Facts:
    """The intervals of a timeline, indexed for finding the causes of gaps."""

    def __init__(self, timeline: Timeline) -> None:
        self._work: defaultdict[int, list[Interval]] = defaultdict(list)
        self._waits: defaultdict[int, list[Interval]] = defaultdict(list)
        self._sent: defaultdict[tuple[int, int], list[Interval]] = defaultdict(list)
        self._joint: dict[tuple[int, int], float] = {}  # when the collectives of a (rank, batch) were done
        self._back: dict[tuple[int, ...], float] = {}  # when what an action waits for was back from the host
        self._arrived: dict[tuple[int, ...], float] = {}  # when the last message for a pass had come
        for i in sorted(timeline.intervals, key=lambda i: (i.start, i.end)):
            if i.is_work:
                self._work[i.rank].append(i)
                if i.what in _SENT:
                    self._sent[i.span, i.microbatch].append(i)
            elif i.lane == "compute":
                self._waits[i.rank].append(i)
            elif i.lane == "collective":
                self._joint[i.rank, i.batch] = max(i.end, self._joint.get((i.rank, i.batch), i.end))
            elif i.lane == "copy" and i.what in _TAKEN:
                self._back[i.rank, *_handled(i)] = i.end
            elif i.what == "SEND":
                key = i.peer, *_handled(i)
                self._arrived[key] = max(i.end, self._arrived.get(key, i.end))
        self._derives = all(i.what == Waiting.POST for waits in self._waits.values() for i in waits)
        self._sections = _sections([i for work in self._work.values() for i in work if i.microbatch >= 0])
        self._start = timeline.start
        self._end = max((i.end for work in self._work.values() for i in work), default=self._start)

    def gaps(self, rank: int) -> Iterator[_Gap]:
        """Yield the idle intervals of a rank, in order."""
        work = self._work[rank]
        following = [self._section(i) for i in work] + [None]
        for place in reversed(range(len(work))):
            following[place] = following[place] or following[place + 1]
        now, section, turned, forwards = self._start, None, False, 0
        for place, action in enumerate([*work, None]):
            end = self._end if action is None else action.start
            if end > now:
                first = action is not None and action.what in _BACKWARD and not turned
                spent = section is not None and section.alternates and forwards == section.forwards[rank]
                gap = _Gap(now, end, section, following[place], first, spent)
                self._explain(gap, rank, action)
                yield gap
            if action is not None:
                now, here = action.end, self._section(action)
                if here is not None and here is not section:
                    section, turned, forwards = here, False, 0
                turned |= action.what in _BACKWARD
                forwards += action.what == "F"

    def _section(self, action: Interval) -> _Section | None:
        return self._sections.get((action.span, action.microbatch))

    def _explain(self, gap: _Gap, rank: int, action: Interval | None) -> None:
        """Add the waits of a gap, and the time at which the input of `action` had been produced."""
        if action is None:
            return
        gap.waits = _during(self._waits[rank], gap) + (self._derived(gap, action) if self._derives else [])
        gap.peers = [i for w in gap.waits if w.what == Waiting.ROOM for i in _during(self._work[w.peer], gap)]
        peers = {w.peer for w in gap.waits if w.what == Waiting.MESSAGE} - {-1}
        for i in self._sent.get((action.span, action.microbatch), ()):
            if i.start < action.start and i.rank != rank and (not peers or i.rank in peers):
                gap.made = i.end  # the end of the last one

    def _derived(self, gap: _Gap, action: Interval) -> list[Interval]:
        """Derive the waits of a simulated rank, whose timeline has none."""
        wait = Interval(action.rank, "compute", gap.start, gap.end, Waiting.MESSAGE, "")
        if action.what != "STEP":
            return self._copied(wait, action)
        done = min(self._joint.get((action.rank, action.batch), gap.start), gap.end)
        copied = self._back.get((action.rank, *_handled(action)), gap.start) >= gap.end
        rest = wait._replace(what=Waiting.COPY if copied else Waiting.ROOM, start=done)
        return [wait._replace(what=Waiting.CONTROL, end=done), rest]

    def _copied(self, wait: Interval, action: Interval) -> list[Interval]:
        """Divide the wait before a pass into that for its message and that for a copy, if that ends later."""
        keys = [(action.rank, *_handled(part)) for part in action.parts or (action,)]
        if max(self._back.get(key, wait.start) for key in keys) < wait.end:
            return [wait]
        come = max(min(self._arrived.get(key, wait.start), wait.end) for key in keys)
        return [wait._replace(end=come), wait._replace(what=Waiting.COPY, start=come)]


def _handled(i: Interval) -> tuple[int, ...]:
    """Return what an action, or a message or copy for it, belongs to: span, stage and microbatch, or batch."""
    return i.span, i.stage, i.direction, i.microbatch, i.batch if i.microbatch < 0 else -1


def _during(intervals: list[Interval], gap: _Gap) -> list[Interval]:
    """Return the intervals of a lane, sorted by time, that overlap a gap (and perhaps one before it)."""
    first = bisect_left(intervals, gap.start, key=lambda i: i.start)
    return intervals[max(first - 1, 0) : bisect_left(intervals, gap.end, key=lambda i: i.start)]


def _sections(passes: Iterable[Interval]) -> dict[tuple[int, int], _Section]:
    """Map every (span, microbatch) to its section; the passes of each rank must be in order."""
    passes = list(passes)
    extents: dict[tuple[int, int], tuple[float, float]] = {}
    for i in passes:
        start, end = extents.get((i.span, i.microbatch), (i.start, i.end))
        extents[i.span, i.microbatch] = min(start, i.start), max(end, i.end)
    found: dict[tuple[int, int], _Section] = {}
    section = _Section(-math.inf, -math.inf)
    for key, (start, end) in sorted(extents.items(), key=lambda item: item[1]):
        if start >= section.end:
            section = _Section(start, end)
        section.end = max(section.end, end)
        found[key] = section
    turned: dict[int, _Section] = {}  # rank -> section of its last backward
    for i in passes:
        section = found[i.span, i.microbatch]
        if i.what in _BACKWARD:
            turned[i.rank] = section
        elif i.what == "F":
            section.forwards[i.rank] += 1
            section.alternates |= turned.get(i.rank) is section
    return found
