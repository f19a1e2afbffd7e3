"""Timelines as a trace for ui.perfetto.dev (the Chrome trace event format)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.timeline import Interval, Timeline


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a trace: a process per rank, a thread per lane (more where messages overlap), a counter per kind of memory.

    Seconds become microseconds; a simulated unit of time becomes a millisecond.
    """
    Path(path).write_text(json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events of a timeline."""
    factor = 1e6 if timeline.unit == "s" else 1e3
    events: list[dict[str, Any]] = []
    rows: dict[tuple[int, str, int], int] = {}
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        rows[rank, "compute", 0] = len(rows)
    for interval, row in _rows(timeline.intervals):
        arguments: dict[str, Any] = {"stage": interval.cut, "batch": interval.batch}
        if interval.version >= 0:
            arguments["version"] = interval.version
        if interval.cause:
            arguments["waits for"] = interval.cause
        events.append(
            {
                "ph": "X",
                "name": interval.label,
                "cat": interval.what,
                "pid": interval.rank,
                "tid": rows.setdefault((interval.rank, interval.lane, row), len(rows)),
                "ts": interval.start * factor,
                "dur": (interval.end - interval.start) * factor,
                "args": arguments,
            }
        )
    for (rank, lane, row), number in rows.items():
        name = lane if row == 0 else f"{lane} ({row + 1})"
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
    for (rank, kind), samples in timeline.memory.items():
        events += [
            {"ph": "C", "name": kind, "pid": rank, "ts": time * factor, "args": {kind: amount}}
            for time, amount in samples
        ]
    return events


def _rows(intervals: Iterable[Interval]) -> Iterator[tuple[Interval, int]]:
    """Each interval with a row of its lane: what overlaps, such as messages under way together, needs several."""
    free_from: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for interval in sorted(intervals, key=lambda i: i.start):
        ends = free_from[interval.rank, interval.lane]
        row = next((row for row, end in enumerate(ends) if end <= interval.start), len(ends))
        ends[row : row + 1] = [interval.end]
        yield interval, row
