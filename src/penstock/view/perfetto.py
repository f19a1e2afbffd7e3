"""Timelines as a trace for ui.perfetto.dev (the Chrome trace event format)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.timeline import Timeline


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a trace: a process per rank, a thread per lane, a counter per kind of memory.

    Seconds become microseconds; a simulated unit of time becomes a millisecond.
    """
    Path(path).write_text(json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events of a timeline."""
    factor = 1e6 if timeline.unit == "s" else 1e3
    events: list[dict[str, Any]] = []
    lanes: dict[tuple[int, str], int] = {}
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        lanes[rank, "compute"] = 0
    for interval in timeline.intervals:
        lanes.setdefault((interval.rank, interval.lane), len(lanes))
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
                "tid": lanes[interval.rank, interval.lane],
                "ts": interval.start * factor,
                "dur": (interval.end - interval.start) * factor,
                "args": arguments,
            }
        )
    for (rank, lane), number in lanes.items():
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
    for (rank, kind), samples in timeline.memory.items():
        events += [
            {"ph": "C", "name": kind, "pid": rank, "ts": time * factor, "args": {kind: amount}}
            for time, amount in samples
        ]
    return events
