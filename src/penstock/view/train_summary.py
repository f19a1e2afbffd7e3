"""The tables that `penstock train` prints at the end of a run, for any pipeline."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.comm.collective.gather import gather_json
from penstock.idle_time import split_time
from penstock.runtime.pipeline import Pipeline
from penstock.view.tables import bytes_table, time_table


def summary(pipeline: Pipeline, width: int = 120) -> str:
    """Return two tables as text: where the time of a pipeline went, and the peak bytes of every rank by purpose.

    Call it between two runs; between processes all ranks call it together, and all get the tables.

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
