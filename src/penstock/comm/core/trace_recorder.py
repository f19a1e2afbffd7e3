"""Trace recorder: what one rank did and when, and how many bytes of each kind of memory were live.

Times are taken on the clock of the process and are told as seconds since the pipeline was made, on a clock common to
all ranks (`penstock.comm.collective.control_plane`).
Only the last `keep` entries are kept, intervals and changes of memory together, so that the memory of a long run is
bounded and reaches its bound soon; totals and peaks cover the whole run.

Where an accelerator computes, work has the times of its own clock (`penstock.comm.core.devices`), and all else,
waits included, those of the host, which issues work ahead of it; so a wait of the host may overlap work of the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from penstock.comm.core.devices import DeviceClock
from penstock.schedule.ir.op_table import Lane
from penstock.timeline import Interval, Timeline, Total, Waiting

KEEP = 50_000
ON_THE_HOST = frozenset({"offloaded activations", "offloaded optimizer"})
"""Kinds of memory that are not on the device, where there is one."""
_COMPUTE = Lane.COMPUTE.value
_START, _END = Interval._fields.index("start"), Interval._fields.index("end")
_CHANGE = 3  # fields of a change of memory: when, kind, bytes; an interval has more


class Labelled(Protocol):
    """What makes its label when somebody asks."""

    @property
    def label(self) -> str:
        """The label of its interval."""


class Recorder:
    """Records the intervals and live bytes of one rank.

    Args:
        rank: the rank.
        origin: zero of the common clock, on this process's `time.perf_counter`.
        keep: how many entries to keep, intervals and changes of memory together.

    Attributes:
        totals: what -> [how often, seconds] on the compute lane, over the whole run.
        now: the time on the clock of the process, in which intervals are recorded.
        begin: the same, and it is the start of the work that `add_work` records next.
        span: the number of the current run or evaluation, from 0.
        peak_on_device: the most bytes of all kinds together but those of `ON_THE_HOST`.
        doing: what the rank is doing, for error messages; to be formatted when somebody asks.
    """

    now = staticmethod(time.perf_counter)

    def __init__(self, rank: int, origin: float, keep: int = KEEP) -> None:
        self.rank, self.origin = rank, origin
        # Tuples are made faster than `Interval`; lists are work whose times the device tells later.
        self._entries: deque[tuple[Any, ...] | list[Any]] = deque(maxlen=keep)
        self.begin: Callable[[], float]
        self.use_clock(None)
        self.totals: dict[str, list[float]] = {}
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._total = self.peak_total = 0
        self._on_device = self.peak_on_device = 0
        self.busy = 0.0
        self.span = self._spans = -1
        self.doing: object = ""
        self.pause()
        self.roles: set[str] = set()  # of parameter-sized memory, as last recorded

    def begin_span(self) -> None:
        """Begin a run or an evaluation, which may be within a run."""
        self._spans += 1
        self.span = self._spans

    def use_clock(self, clock: DeviceClock | None) -> None:
        """Take the times of work from the clock of a device; from the host's if None."""
        self._clock = clock
        self.begin = self.now if clock is None else self._begin

    def align(self) -> None:
        """Align the clock of the device with the host's, which waits for the device: before a run or an evaluation."""
        if self._clock is not None:
            self._clock.align()

    def read_clock(self) -> None:
        """Take down the times of all work that the device has done since; waits for nothing."""
        if self._clock is not None:
            self._clock.read()

    def pause(self) -> None:
        """Record that no run is active, which waits for the device."""
        if self._clock is not None:
            self._clock.read(wait=True)
        self.doing = f"rank {self.rank}, between two runs"

    def _begin(self) -> float:
        if self._clock is not None:
            self._clock.begin()
        return time.perf_counter()

    def at(self, stamp: float) -> float:
        """Convert a time on the clock of the process to the common clock."""
        return stamp - self.origin

    def add(
        self,
        lane: str,
        start: float,
        end: float,
        what: str,
        label: str,
        stage: int = 0,
        direction: int = 0,
        batch: int = -1,
        version: int = -1,
        cause: str = "",
        microbatch: int = -1,
        peer: int = -1,
    ) -> None:
        """Record an interval (`penstock.timeline.Interval`) in which the rank does no work."""
        numbers = stage, direction, batch, version, cause, microbatch, self.span, peer
        self._entries.append((self.rank, lane, start, end, what, label, *numbers))
        if lane != _COMPUTE:
            return
        total = self.totals.get(what)
        if total is None:
            total = self.totals[what] = [0, 0.0]
        total[0] += 1
        total[1] += end - start

    def add_work(
        self, start: float, end: float, what: str, named: str | Labelled, stage: int, direction: int, batch: int,
        version: int, microbatch: int,
    ) -> None:  # fmt: skip
        """Record an interval in which the rank works, or, where it has a device, that work has been issued.

        The label is asked for when the recording is read.
        """
        numbers = stage, direction, batch, version, "", microbatch, self.span, -1
        if self._clock is not None:
            entry = [self.rank, _COMPUTE, start, end, what, named, *numbers]
            self._entries.append(entry)
            if not self._clock.end(partial(self._done, entry, what)):
                self._count_work(what, end - start)
            return
        self._entries.append((self.rank, _COMPUTE, start, end, what, named, *numbers))
        self.busy += end - start
        total = self.totals.get(what)
        if total is None:
            total = self.totals[what] = [0, 0.0]
        total[0] += 1
        total[1] += end - start

    def wait_on_device(
        self, wait: Callable[[], object], label: str, stage: int, direction: int, batch: int, microbatch: int = -1
    ) -> float | None:
        """Have a device wait for what comes back from the host's memory, and record for how long.

        Args:
            wait: has the work that follows wait; it returns at once.
            label, stage, direction, batch, microbatch: of the interval.

        Returns:
            The start of the work that follows; None where no device computes.
        """
        if self._clock is None:
            wait()
            return None
        start = self.begin()
        wait()
        numbers = stage, direction, batch, -1, "", microbatch, self.span, -1
        entry = [self.rank, _COMPUTE, start, self.now(), Waiting.COPY, label, *numbers]
        self._entries.append(entry)
        if not self._clock.end(partial(self._waited, entry)):
            self._waited(entry, start, start)
        return self.begin()

    def _waited(self, entry: list[Any], start: float, end: float) -> None:
        """Take down when a device has waited."""
        entry[_START], entry[_END] = start, end
        total = self.totals.setdefault(Waiting.COPY, [0, 0.0])
        total[0] += 1
        total[1] += end - start

    def _done(self, entry: list[Any], what: str, start: float, end: float) -> None:
        """Take down when a device has done some work."""
        entry[_START], entry[_END] = start, end
        self._count_work(what, end - start)

    def _count_work(self, what: str, seconds: float) -> None:
        self.busy += seconds
        total = self.totals.setdefault(what, [0, 0.0])
        total[0] += 1
        total[1] += seconds

    def hold(self, kind: str, nbytes: int) -> None:
        """Set the live bytes of one kind."""
        before = self.live.get(kind)
        if before == nbytes:
            return
        if before is None:
            before, self.peak[kind] = 0, 0
        self.live[kind] = nbytes
        self._total += nbytes - before
        if kind not in ON_THE_HOST:
            self._on_device += nbytes - before
        if nbytes > before:
            self.peak[kind] = max(self.peak[kind], nbytes)
            self.peak_total = max(self.peak_total, self._total)
            self.peak_on_device = max(self.peak_on_device, self._on_device)
        self._entries.append((self.now(), kind, nbytes - before))

    def change(self, kind: str, nbytes: int) -> None:
        """Add to the live bytes of one kind."""
        if not nbytes:
            return
        live = self.live.get(kind)
        if live is None:
            self.hold(kind, nbytes)
            return
        self.live[kind] = live = live + nbytes
        self._total += nbytes
        if kind not in ON_THE_HOST:
            self._on_device += nbytes
        if nbytes > 0:
            if live > self.peak[kind]:
                self.peak[kind] = live
            if self._total > self.peak_total:
                self.peak_total = self._total
            if self._on_device > self.peak_on_device:
                self.peak_on_device = self._on_device
        self._entries.append((self.now(), kind, nbytes))

    def recording(self) -> dict[str, Any]:
        """Return everything that is kept, as plain values that can be serialized."""
        self.read_clock()
        at = self.at
        intervals = [
            (rank, lane, at(start), at(end), what, label if isinstance(label, str) else label.label, *numbers)
            for rank, lane, start, end, what, label, *numbers in (e for e in self._entries if len(e) > _CHANGE)
        ]
        since = 0.0  # everything that began later is kept
        if len(self._entries) == self._entries.maxlen:
            oldest = self._entries[0]
            if self._clock is not None:  # work was dropped that began after the host had issued what is kept
                oldest = next((entry for entry in self._entries if isinstance(entry, list)), oldest)
            since = max(at(oldest[_START] if len(oldest) > _CHANGE else oldest[0]), 0.0)
        return {
            "rank": self.rank,
            "since": since,
            "intervals": intervals,
            "memory": self._memory(since),
            "totals": {what: list(total) for what, total in self.totals.items()},
        }

    def _memory(self, since: float) -> dict[str, list[tuple[float, float]]]:
        """Return what was live of each kind, from when on: from `since`, and from every change after it."""
        live, found = dict(self.live), dict[str, list[tuple[float, float]]]()
        for entry in reversed(self._entries):  # only the last amounts are known
            if len(entry) == _CHANGE:
                when, kind, nbytes = entry
                found.setdefault(kind, []).append((self.at(when), live[kind]))
                live[kind] -= nbytes
        for kind, nbytes in live.items():
            samples = found.setdefault(kind, [])
            if nbytes:  # it had some when the entries before were dropped
                samples.append((since, nbytes))
            samples.reverse()
        return found


def merge_recordings(parts: Sequence[dict[str, Any]], ranks: int) -> Timeline:
    """Merge the recordings of all ranks into one timeline, from the time since which every rank has kept all."""
    since = max(part["since"] for part in parts)
    timeline = Timeline(ranks, since=since)
    for part in parts:
        timeline.intervals += [Interval(*interval) for interval in part["intervals"] if interval[_START] >= since]
        for kind, samples in part["memory"].items():
            timeline.memory[part["rank"], kind] = [(when, amount) for when, amount in samples]
        for what, (times, seconds) in part["totals"].items():
            timeline.totals[part["rank"], what] = Total(int(times), seconds)
    return timeline
