"""The times of a pipeline that all ranks agree on, as each has measured its own part."""

from __future__ import annotations

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.recorder import Recorder
from penstock.runtime.in_flight.measure import Measured, measure_rank, merge, messages_of_rank


def measured_by_all(recorder: Recorder, grid: RankGrid, batches: range) -> Measured | None:
    """Return what all ranks have measured, the same on all of them; all call this together.

    Args:
        recorder: of the rank in this process.
        grid: all ranks, each in a process of its own.
        batches: counted from the start of training.

    Returns:
        The times; None where a rank has measured nothing.

    Raises:
        TransportError: a peer is dead.
    """
    recording = recorder.recording()
    told = gather_json(measure_rank(recording, batches, grid.depth), "measuring passes", grid.control)
    messages = gather_json(messages_of_rank(recording, told), "measuring messages", grid.control)
    return merge(told, messages, grid.depth)
