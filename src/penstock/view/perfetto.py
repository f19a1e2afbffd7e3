"""Write timelines as traces for ui.perfetto.dev (the Chrome trace event format).

A slice is named, for example, "F6 stage 1 v2": operation and microbatch (or batch), stage, version of the weights that
are read (or created, by an update). A wait names its cause. Arrows lead from the pass that makes a message over its
transfer to the pass that takes it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.guarded_files import write_whole
from penstock.schedule.ir.schedule import Op, Payload
from penstock.timeline import Interval, Timeline
from penstock.view.timeline_labels import parts_of, pieces_of, unit_of

_ENDS: dict[str, tuple[tuple[Op, ...], tuple[Op, ...]]] = {  # what makes a message, and what takes it
    Payload.ACTIVATION: ((Op.F,), (Op.F,)),
    Payload.GRADIENT: ((Op.B, Op.I), (Op.B, Op.I)),
    Payload.RECOMPUTE: ((Op.R,), (Op.R,)),
    Payload.REPAIR: ((Op.REDO,), (Op.REDO,)),
    Payload.PARKED: ((Op.OFFLOAD, Op.RETURN), (Op.HOLD, Op.FETCH)),
}
_SHORTEST = 0.01  # microseconds: what lasts less has no room for an event, as traces count in nanoseconds
_INSET = 1.0  # microseconds from the border of a slice to an event in it
_APART = 0.002  # microseconds between two events of an arrow, at least


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as a trace for ui.perfetto.dev or chrome://tracing.

    It has a process per rank, a thread per lane (more where messages overlap) and a counter per kind of memory. Seconds
    become microseconds; a simulated unit of time becomes a millisecond.
    """
    write_whole(Path(path), json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the trace events of a timeline."""
    factor = 1e6 if timeline.unit == "s" else 1e3
    events: list[dict[str, Any]] = []
    rows: dict[tuple[int, str, int], int] = {}  # Perfetto shows the counters of process n at thread n: the compute lane
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        rows[rank, "compute", 0] = len(rows)
    slices, unseen = [], []
    for interval, row in _rows(timeline.intervals):
        if interval.what == Op.SEND and interval.end <= interval.start:  # its arrow is all there is to see
            unseen.append(Slice(interval, -1, interval.start * factor, interval.end * factor))
            continue
        tid = rows.setdefault((interval.rank, interval.lane, row), len(rows))
        slices.append(Slice(interval, tid, interval.start * factor, interval.end * factor))
    events += [_slice_event(found) for found in slices]
    events += arrow_events([*slices, *unseen])
    for (rank, lane, row), number in rows.items():
        name = lane if row == 0 else f"{lane} ({row + 1})"
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
    for (rank, kind), samples in timeline.memory.items():
        events += [
            {"ph": "C", "name": kind, "pid": rank, "ts": time * factor, "args": {kind: amount}}
            for time, amount in samples
        ]
    return events


def _slice_event(found: Slice) -> dict[str, Any]:
    """Return the complete event of a slice."""
    interval, tid, start, end = found
    place = {"pid": interval.rank, "tid": tid, "ts": start, "dur": end - start}
    return {"ph": "X", "name": _name(interval), "cat": interval.what, **place, "args": _arguments(interval)}


def _name(interval: Interval) -> str:
    if interval.what == Op.SEND or max(interval.batch, interval.microbatch) < 0:
        return interval.label
    return f"{interval.label} stage {interval.stage}" + (f" v{interval.version}" if interval.version >= 0 else "")


def _arguments(interval: Interval) -> dict[str, Any]:
    """Return the attributes of an interval."""
    names = ("batch", "microbatch", "version")
    known: dict[str, Any] = {name: getattr(interval, name) for name in names if getattr(interval, name) >= 0}
    if known and interval.what != Op.SEND:
        known["stage"] = interval.stage
    return known | ({"waits for": interval.cause} if interval.cause else {})


def _rows(intervals: Iterable[Interval]) -> Iterator[tuple[Interval, int]]:
    """Yield each interval with a row of its lane, so that overlapping intervals get different rows."""
    free_from: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for interval in sorted(intervals, key=lambda i: i.start):
        ends = free_from[interval.rank, interval.lane]
        row = next((row for row, end in enumerate(ends) if end <= interval.start), len(ends))
        ends[row : row + 1] = [interval.end]
        yield interval, row


# Arrows of a trace, from the pass that makes a message, over its transfer, to the pass that takes it.
#
# In the Chrome trace event format an arrow is a chain of flow events with one category, name and id: `s` at its
# start, `t` at a step, `f` at its end (with `bp: "e"`, so that it, too, belongs to the slice around it and not to the
# next one). Each is bound to the slice of its process and thread that is open at its time. A slice without duration
# is never open, so arrows pass over it; and times must not decrease along an arrow, although the clocks of two ranks
# agree only so well.


class Slice(NamedTuple):
    """An interval where a trace shows it.

    Attributes:
        interval: what is shown.
        tid: the thread.
        start, end: in microseconds.
    """

    interval: Interval
    tid: int
    start: float
    end: float


def arrow_events(slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """Yield the flow events of the arrows of all messages."""
    passes = _Passes(slices)
    messages = [found for found in slices if found.interval.what == Op.SEND]
    for number, message in enumerate(messages):
        stops = [passes.maker(message), message, passes.taker(message)]
        chain = [stop for stop in stops if stop is not None and stop.end - stop.start >= _SHORTEST]
        times = _times(chain)
        if len(chain) < 2 or len(times) < len(chain):
            continue
        phases = ["s", *["t"] * (len(chain) - 2), "f"]
        name = message.interval.label.split()[0]
        for stop, time, phase in zip(chain, times, phases, strict=True):
            place = {"pid": stop.interval.rank, "tid": stop.tid, "ts": time}
            event = {"ph": phase, "name": name, "cat": "message", "id": number, **place}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _times(chain: Sequence[Slice]) -> list[float]:
    """Return a time within every slice, none earlier than the one before; fewer where that is impossible."""
    times: list[float] = []
    for place, (_, _, start, end) in enumerate(chain):
        inset = min(_INSET, (end - start) / 2)
        time = end - inset if place == 0 and chain[0].interval.what != Op.SEND else start + inset
        time = max(time, times[-1] + _APART) if times else time
        if time > end - _SHORTEST / 4:
            break
        times.append(time)
    return times


class _Passes:
    """Finds the passes that make and take messages."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._found: defaultdict[tuple[int, int, str, tuple[int, int]], list[tuple[Interval, Slice]]] = defaultdict(
            list
        )
        for found in slices:
            if found.interval.what != Op.SEND:
                for part in parts_of(found.interval):
                    for piece in pieces_of(unit_of(part)) if part.microbatch >= 0 else ():
                        self._found[part.span, part.rank, part.what, piece].append((part, found))

    def maker(self, message: Slice) -> Slice | None:
        """Return the pass directly after which the message was posted: the last one of its unit before that."""
        sent = message.interval
        earlier = [found for part, found in self._of(sent, sent.rank, 0) if part.end <= sent.start]
        return max(earlier, key=lambda found: found.end, default=None)

    def taker(self, message: Slice) -> Slice | None:
        """Return the pass at the stage that receives the message."""
        sent = message.interval
        place = sent.stage, sent.direction
        there = (found for part, found in self._of(sent, sent.peer, 1) if (part.stage, part.direction) == place)
        return next(there, None)

    def _of(self, sent: Interval, rank: int, end: int) -> Iterator[tuple[Interval, Slice]]:
        """Yield the passes of a rank that may stand at one end of a message."""
        payload, unit = sent.label.split()
        piece = pieces_of(unit)[0]
        for op in _ENDS[payload][end]:
            yield from self._found.get((sent.span, rank, op.value, piece), ())
