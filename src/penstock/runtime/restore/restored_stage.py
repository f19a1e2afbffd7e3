"""Restores stages from a saved state, whatever the depth, width and method were that it was saved with.

Each holder of a stage reads the rows that it owns into their places, one tensor at a time; what others have read of the
same stage comes from them, before `Restored.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.rank.snapshot import WRITTEN, older_kind
from penstock.runtime.restore.saved_rows import SavedTensors
from penstock.runtime.restore.saved_state import SavedState
from penstock.runtime.restore.stage_reader import StageReader
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.corrections.base import Corrector
from penstock.weights.replica_averaging import COMMON


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
