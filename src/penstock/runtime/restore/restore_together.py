"""Restores the stages of all ranks from a saved state, of which each rank reads what it owns.

Where stages are divided among pipelines, every row is read from the disk once, and the other holders have it from its
owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.comm.collective.all_gather_json import gather_json
from penstock.comm.collective.shard_exchange import GlooShards, LocalShards
from penstock.comm.communicators import holders_of
from penstock.comm.core.rank_grid import Holder, RankGrid
from penstock.comm.core.ticket import Ticket
from penstock.errors import CheckpointError
from penstock.runtime.rank.snapshot import WRITTEN, older_kind
from penstock.runtime.restore.saved_rows import SavedTensors
from penstock.runtime.restore.saved_state import SavedState
from penstock.runtime.restore.stage_reader import StageReader
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.sharding import Level
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.corrections.base import Corrector
from penstock.weights.replica_averaging import COMMON

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


class Restored:
    """A stage whose state is read from a snapshot, with nothing in flight.

    Args:
        stage: the stage.
        saved: the snapshots of all stages.
        tensors: of them.
        older: how many versions before the newest passes will read.
        blocks: all of the model.

    Attributes:
        stage: as given.
        rest: the memory of weights of which only the own rows have been read, as flat tensors, by owner of the rows.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the optimizer is another one.
    """

    def __init__(
        self,
        stage: StageRuntime,
        saved: SavedState,
        tensors: SavedTensors,
        older: int,
        blocks: Mapping[str, Any],
    ) -> None:
        self.stage, self._saved, self._reader = stage, saved, StageReader(stage, saved, tensors, blocks)
        self.rest: list[list[Tensor]] = []
        self._ahead = False
        self._reader.check()
        for name, tensor in stage.module.tensors.unversioned().items():
            self._reader.fill(self._reader.fixed(name), name, tensor.shape, tensor)
        if isinstance(stage.weights, TrainedWeights):
            self._read_trained(stage.weights, older)

    def _read_trained(self, weights: TrainedWeights, older: int) -> None:
        """Read the state of a stage's trained parameters; what is not divided is left to `finish`."""
        reader, saved, store = self._reader, self._saved, weights.store
        self._ahead = store.reads_ahead and older > 0
        room = store.restart(int(saved.facts["batch"]), older)
        self._fill(weights, room.newest, partial(reader.kind, "weights"))
        for back, views in enumerate(room.older, 1):
            kind = partial(reader.kind, f"ahead.{back}" if self._ahead else older_kind(back))
            self._fill(weights, views, kind, room.older_rows)
        if room.ahead is not None and self._ahead:
            self._fill(weights, room.ahead, partial(reader.kind, "ahead"))
        if weights.average is not None:
            saved_average = any(reader.has("average", name) for name in weights.average.views)
            weights.average.rewrite()
            self._fill(weights, weights.average.views, partial(reader.kind, "average" if saved_average else "weights"))
        updates = saved.facts.get(f"updates{reader.own}", saved.facts["updates"])
        weights.updater.load(int(updates), reader.optimizer_state())
        weights.updater.rates.load(reader.settings(), weights.updater.updates)

    def _fill(
        self, weights: TrainedWeights, views: Mapping[str, Tensor], kind: Callable[[str], str], rows_alone: bool = False
    ) -> None:
        """Read weights, of those that are divided the own rows, into their places.

        Args:
            weights: of the stage.
            views: where they go, by name.
            kind: what they are called in the saved state, by name.
            rows_alone: these are places for the own rows, and not for all.
        """
        shards = weights.store.shards if isinstance(weights, ShardedWeights) and not rows_alone else None
        for name, view in views.items():
            rows = self._reader.rows(name)
            place = view if shards is None else rows.of(view)
            self._reader.fill(kind(name), name, weights.store.layout.slots[name].shape, place, rows)
        if shards is not None and shards.holders > 1:
            parts = shards.flat(views)
            self.rest = [[*mine, *more] for mine, more in zip(self.rest or [[]] * len(parts), parts, strict=True)]

    def finish(self) -> None:
        """Go on with the weights, which are whole now, and read what is never divided."""
        if isinstance(self.stage.weights, TrainedWeights):
            self._finish_trained(self.stage.weights)
        self.stage.restore()

    def _finish_trained(self, weights: TrainedWeights) -> None:
        reader, saved, views, agreement = self._reader, self._saved, weights.store.master.views, weights.agreement
        weights.store.refilled(ahead=self._ahead)
        weights.watch_writes()
        weights.rewritten = WRITTEN in saved.facts
        if weights.older is not None:
            weights.older.restart(int(saved.facts["batch"]), reader.find_delayed)
        if agreement is not None:
            agreement.recall(saved.facts)
            common = [(kind, name) for kind in COMMON for name in views if reader.has(kind, name)]
            agreement.load({f"{kind}/{name}": reader.read(kind, name, views[name]) for kind, name in common})
        if weights.corrector is not None:
            _restore_corrector(weights.corrector, reader, saved)


def _restore_corrector(corrector: Corrector, reader: StageReader, saved: SavedState) -> None:
    """Restore the state of a correction; it begins at zero where the checkpoint has none, or that of another one."""
    same = saved.facts.get("correction") == corrector.name
    corrector.began = int(saved.facts["corrected_from" if same else "updates"])
    for kind, buffer in corrector.buffers.items():
        known = {name for name in buffer.views if same and reader.has(kind, name)}
        views = buffer.views.items()
        buffer.load({n: reader.read(kind, n, v) if n in known else torch.zeros_like(v) for n, v in views})
