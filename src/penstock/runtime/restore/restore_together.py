"""Restores the stages of all ranks from a saved state, of which each rank reads what it owns.

Where stages are divided among pipelines, every row is read from the disk once, and the other holders have it from its
owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.collective.shard_exchange import GlooShards, LocalShards
from penstock.comm.communicators import holders_of
from penstock.comm.core.rank_grid import Holder, RankGrid
from penstock.comm.core.ticket import Ticket
from penstock.errors import CheckpointError
from penstock.runtime.restore.restored_stage import Restored
from penstock.runtime.restore.saved_rows import SavedTensors
from penstock.runtime.restore.saved_state import SavedState
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.sharding import Level

_WHAT = "loading a saved state, in load()"


def restore_all(
    saved: SavedState,
    older: int,
    blocks: Mapping[str, Any],
    ranks: Sequence[RankState],
    grid: RankGrid,
    schedule: Schedule,
) -> None:
    """Restore the stages of this process; where stages are divided, all processes call this together.

    Args:
        saved: the state.
        older: how many versions before the newest passes will read.
        blocks: all of the model.
        ranks: of this process.
        grid: of all.
        schedule: that they run.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or an optimizer is another one; where stages are
            divided, here or on another rank.
        TransportError: a peer is dead, or has not called this in time.
    """
    divided = schedule.sharding.level is not Level.NONE
    tensors, found, failure = SavedTensors(saved), list[tuple[int, Restored]](), None
    try:
        for state in ranks:
            for _, stage in sorted(state.stages.items()):  # an order that parallel pipelines have in common
                found.append((state.key.pipeline, Restored(stage, saved, tensors, older, blocks)))
    except Exception as error:  # the others must hear of it before it is raised here
        failure = error
    told = []
    if divided and grid.group is not None:
        told = gather_json(None if failure is None else str(failure), _WHAT, grid.everyone)
    if failure is not None:
        raise failure
    elsewhere = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
    if elsewhere is not None:
        raise CheckpointError(f"rank {elsewhere[0]} could not load its part of the checkpoint: {elsewhere[1]}")
    if divided:
        _complete(found, grid, schedule, int(saved.facts["batch"]))
    for _, restored in found:
        restored.finish()


def _complete(found: Sequence[tuple[int, Restored]], grid: RankGrid, schedule: Schedule, batch: int) -> None:
    """Exchange the rows that the holders of each stage have read."""
    exchange = LocalShards() if grid.group is None else GlooShards(grid.process, grid.control)
    holders = holders_of(schedule, grid.width)
    tickets: list[Ticket] = []
    try:
        for pipeline, restored in found:
            if restored.rest:
                key = restored.stage.key
                tickets.append(exchange.gather(holders[key.index], Holder(pipeline, key), batch, restored.rest))
        for ticket in tickets:
            ticket.wait(grid.patience.total_seconds(), _WHAT)
    finally:
        exchange.close()
