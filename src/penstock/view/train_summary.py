"""The tables that `penstock train` prints at the end of a run, for any pipeline."""

from __future__ import annotations

import io

from rich.console import Console, Group
from rich.text import Text

from penstock.comm.collective.all_gather_json import gather_json
from penstock.idle_time import split_time
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.pipeline_stats import TOTAL_ON_DEVICE
from penstock.view.tables import bytes_table, time_table

_PEAKS = (
    "Each purpose at its own most, which others may have had at another time; total: the most of all together at one "
    "time, so it may be less than the sum of its column."
)
_IDLE = " Idle buffers: kept for the weights and gradients of later batches, and not in use at that time."
_ON_DEVICE = " Total on the device: the same without what is in the memory of the host."


def peak_bytes_table(by_rank: dict[int, dict[str, int]], width: int) -> Group:
    """Return a table of the most bytes of each purpose, and below it what its figures are.

    Args:
        by_rank: rank -> purpose -> bytes.
        width: of the terminal in characters.
    """
    said = _PEAKS + _IDLE * any(held.get("idle buffers") for held in by_rank.values())
    if any(TOTAL_ON_DEVICE in held for held in by_rank.values()):
        said += _ON_DEVICE
        by_rank = {r: {TOTAL_ON_DEVICE: held.get("total", 0), **held} for r, held in by_rank.items()}
    note = Text(said, style="dim italic")  # as the captions of tables are
    return Group(bytes_table(by_rank, "peak bytes", width), note)


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
    console.print(time_table(split), peak_bytes_table(dict(peaks), console.width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
