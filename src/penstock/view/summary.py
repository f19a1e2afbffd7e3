"""The tables that end a run of `penstock train`, for a pipeline of one's own."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.comm.collective.gather import gather_json
from penstock.idle_time import split_time
from penstock.runtime.pipeline import Pipeline
from penstock.view.tables import bytes_table, time_table


def summary(pipeline: Pipeline, width: int = 120) -> str:
    """Return where the time of a pipeline went, and its peak bytes by rank and purpose, as two tables of text.

    Between two runs; between processes all ranks call this together.

    Args:
        pipeline: that has run.
        width: characters of a line.

    Raises:
        TransportError: a peer is dead, or did not call this in time.
    """
    split, peaks = split_time(pipeline.timeline()), list(pipeline.peak_bytes().items())
    if pipeline.grid.group is not None:
        gathered = gather_json(peaks, "gathering the peak bytes", pipeline.grid.control)
        peaks = [(rank, held) for part in gathered for rank, held in part]
    console = Console(file=io.StringIO(), width=width)
    console.print(time_table(split), bytes_table(dict(peaks), "peak bytes", console.width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
