"""Write timelines as traces for ui.perfetto.dev (the Chrome trace event format).

A slice is named, for example, "F6 stage 1 v2": operation and microbatch (or batch), stage, version of the weights that
are read (or created, by an update). A wait names its cause. Arrows lead from the pass that makes a message over its
transfer to the pass that takes it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.guarded_files import write_whole
from penstock.schedule.ir.schedule import Op
from penstock.timeline import Interval, Timeline
from penstock.view.drawing.trace_flow_events import Slice, arrow_events


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
