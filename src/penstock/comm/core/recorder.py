"""What one rank did and when, and what every live byte is for.

Times are seconds on a clock common to all ranks (`penstock.comm.collective.clock_sync`), since the pipeline was made.
The last `keep` intervals are kept, so that a long run does not grow without bound; sums go on for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from penstock.timeline import Interval, Timeline

KEEP = 50_000


class Recorder:
    """Intervals and live bytes of one rank.

    Args:
        rank: the rank.
        origin: what `now` counts from, on this process's `time.perf_counter`.
        keep: intervals and samples to keep.

    Attributes:
        span: the run or evaluation under way, counted from 0.
        doing: what the rank is doing, for messages.
    """

    def __init__(self, rank: int, origin: float, keep: int = KEEP) -> None:
        self.rank, self.origin = rank, origin
        self.intervals: deque[Interval] = deque(maxlen=keep)
        self.samples: dict[str, deque[tuple[float, float]]] = {}
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._total = self.peak_total = 0
        self.busy = 0.0
        self.span = self._spans = -1
        self.doing = ""
        self.pause()
        self._keep = keep
        self.roles: set[str] = set()  # of parameter-sized memory, as last told

    def begin_span(self) -> None:
        """A run or an evaluation begins, the latter perhaps in the midst of a run."""
        self._spans += 1
        self.span = self._spans

    def pause(self) -> None:
        """Nothing is under way."""
        self.doing = f"rank {self.rank}, between two runs"

    def now(self) -> float:
        """The common time."""
        return time.perf_counter() - self.origin

    def at(self, stamp: float) -> float:
        """The common time of a stamp of `time.perf_counter`."""
        return stamp - self.origin

    def add(self, interval: Interval) -> None:
        """Record an interval."""
        self.intervals.append(interval)
        if interval.is_work:
            self.busy += interval.end - interval.start

    def hold(self, kind: str, nbytes: int) -> None:
        """Set the live bytes of one kind."""
        before = self.live.get(kind)
        if before == nbytes:
            return
        if before is None:
            before, self.peak[kind], self.samples[kind] = 0, 0, deque(maxlen=self._keep)
        self.live[kind] = nbytes
        self._total += nbytes - before
        if nbytes > before:
            self.peak[kind] = max(self.peak[kind], nbytes)
            self.peak_total = max(self.peak_total, self._total)
        self.samples[kind].append((self.now(), nbytes))

    def change(self, kind: str, nbytes: int) -> None:
        """Add to the live bytes of one kind."""
        if nbytes:
            self.hold(kind, self.live.get(kind, 0) + nbytes)

    def recording(self) -> dict[str, Any]:
        """What is kept, in plain values that can travel."""
        full = len(self.intervals) == self.intervals.maxlen
        return {
            "rank": self.rank,
            "since": max(self.intervals[0].start, 0.0) if full else 0.0,  # from when on all intervals are kept
            "intervals": list(self.intervals),
            "memory": {kind: list(samples) for kind, samples in self.samples.items()},
        }


def merge_recordings(parts: Sequence[dict[str, Any]], ranks: int) -> Timeline:
    """One timeline of all ranks: of a long run, what every rank still remembers."""
    since = max(part["since"] for part in parts)
    timeline = Timeline(ranks, since=since)
    for part in parts:
        timeline.intervals += [Interval(*interval) for interval in part["intervals"] if interval[2] >= since]
        for kind, samples in part["memory"].items():
            timeline.memory[part["rank"], kind] = [(when, amount) for when, amount in samples]
    return timeline
