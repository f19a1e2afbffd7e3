"""Wave-synchronous updates of pipelines from each other (wsp); `schedule.methods.data_parallel_sync` has the equations.

At the end of a wave `push` returns its weight changes, to be sent, and buffers for those of the others. Once as many
waves have arrived as `due` says, `take` adds them. `pull` resets the count when the pipeline is drained.

All pipelines add the same numbers to the global model in the same order, by wave and then by pipeline, so it stays
equal without being sent. To their weights they add those of others, in the same order; their own are already included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.schedule.methods.wave_lags import stage_place
from penstock.weights.memory.buffers import Buffer
from penstock.weights.store import VersionStore
from penstock.weights.writes_between_runs import WrittenCheck

COMMON = "common"  # the kind of tensors that `copies` makes


@dataclass
class Wave:
    """A wave that is not known to have reached all pipelines.

    Attributes:
        updates: per pipeline its weight changes, one flat tensor per dtype; those of others once they have arrived.
    """

    updates: list[list[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all its updates."""
        return sum(tensor.nbytes for tensors in self.updates for tensor in tensors)


class WaveWeights:
    """Adds the updates of other pipelines to one stage of one pipeline. Waves are counted from the last drain.

    Args:
        combine: how pipelines are combined.
        width: w, the number of pipelines.
        pipeline: the index of this one.
        store: the store of the stage.
        stage: the name of the stage.

    Attributes:
        combine, width, pipeline: as given.
        model: W_g, as large as the weights.
        motion: None.
        taken: per pipeline, the number of waves that the weights include.
        place: name of the stage in a record of lags.
        record: batch after which a wave ended -> recorded lags, unless they are chosen.
        watch: detects writes into the weights between two runs.
    """

    motion: Buffer | None = None

    def __init__(self, combine: Combine, width: int, pipeline: int, store: VersionStore, stage: str) -> None:
        self.combine, self.width, self.pipeline = combine, width, pipeline
        self.place, self.record = stage_place(pipeline, stage), dict[int, list[int]]()
        self._store, self._known = store, combine.lag.get(self.place, {}) if isinstance(combine.lag, Mapping) else None
        if self._known == {}:
            raise ConfigError(
                f"combine: lag was not recorded at {self.place} (pipeline/stage) of this run; use the same stages"
            )
        self.model = Buffer(store.layout, f"global model of {store.where}")
        self._begun = Buffer(store.layout, f"beginning of the wave of {store.where}")  # weights at its start
        self._open: deque[Wave] = deque()  # oldest first
        self.taken = [0] * width
        self.watch = WrittenCheck(store)
        self.load({})

    @property
    def complete(self) -> int:
        """The number of waves that all pipelines have ended, as far as this one has added them."""
        return min(self.taken)

    @property
    def _ended(self) -> int:
        """Return the number of waves that this pipeline has ended."""
        return self.taken[self.pipeline]

    # --- the end of a wave ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self) -> Wave:
        """End the wave: return this pipeline's weight changes, and buffers for those of the others."""
        master = self._store.master
        own = [now - before for now, before in zip(master.flats, self._begun.flats, strict=True)]
        updates = [own if q == self.pipeline else [torch.empty_like(t) for t in own] for q in range(self.width)]
        self._open.append(Wave(updates))
        self.taken[self.pipeline] += 1
        return self._open[-1]

    def due(self, batch: int) -> list[int]:
        """Return, per pipeline, the number of waves that must have arrived now.

        Args:
            batch: the batch after which the wave has ended.

        Raises:
            ConfigError: a record is replayed that has no lags for this batch.
        """
        lags: Sequence[int] = self.combine.lags(self.width)
        if self._known is not None:
            if batch not in self._known:
                raise ConfigError(
                    f"combine: lag was recorded at {self.place} after batches {min(self._known)} to "
                    f"{max(self._known)}, but not after batch {batch}, where a wave has ended; start where that run "
                    "started, and do not train longer"
                )
            lags = self._known[batch]
        counts = [max(self._ended - lag, self.taken[q]) for q, lag in enumerate(lags)]
        counts[self.pipeline] = self._ended
        return counts

    def all(self) -> list[int]:
        """Return, per pipeline, the number of all waves it has ended, which must arrive before a drain ends."""
        return [self._ended] * self.width

    def record_lags(self, batch: int, counts: Sequence[int]) -> None:
        """Record that so many waves of each pipeline are added after a batch."""
        self.record[batch] = [self._ended - count for count in counts]

    @torch.no_grad()
    def take(self, counts: Sequence[int]) -> None:
        """Add the updates of so many waves of each pipeline."""
        first = self.complete
        new = sorted((wave, q) for q, n in enumerate(counts) for wave in range(self.taken[q], n))
        if new:
            torch.clear_autocast_cache()  # it holds casts of leaves whose memory changes now
            self._store.master.rewrite()
        for wave, q in new:
            _add(self._store.master, self._open[wave - first].updates[q], self.combine.share)
        if new:
            self._store.publish(self._store.newest)
        self.taken = list(counts)
        self._begin_wave()
        if self.complete > first:
            self.model.rewrite()
        for _ in range(first, self.complete):
            for update in self._open.popleft().updates:
                _add(self.model, update, 1.0)

    def pull(self) -> None:
        """Restart all pipelines from the global model, after all waves have been added."""
        assert not self._open, "pulled with waves under way"
        self.taken = [0] * self.width
        if self.combine.agrees:
            torch.clear_autocast_cache()
            self._store.master.load(self.model.views)
            self._store.publish(self._store.newest)
            self._begin_wave()

    def _begin_wave(self) -> None:
        self._begun.load(self._store.master.views)

    # --- state ------------------------------------------------------------------------------------------------------

    def begin_span(self, batches: int) -> None:
        """Begin a span; weights may have been written since the last one.

        Args:
            batches: number of batches trained on so far.
        """
        if self.combine.agrees or not batches:
            self.load({})
        else:
            self._begin_wave()

    def agrees(self, batch: int) -> bool:
        """Return whether all pipelines have the same newest weights before a batch, once drained."""
        return self.combine.agrees or batch == 0

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of the state and of the waves in transit."""
        return {
            "common model": self.model.nbytes,
            "weights before the wave": self._begun.nbytes,
            "waves": sum(wave.nbytes for wave in self._open),
        }

    def copies(self) -> dict[str, Tensor]:
        """Copy the global model, by kind and name of the parameter, where it differs from the newest weights."""
        views = {} if self.combine.agrees else self.model.views
        return {f"{COMMON}/{name}": view.clone() for name, view in views.items()}

    def facts(self) -> dict[str, Any]:
        """Return the recorded lags, by a name that is unique to this stage."""
        record = {str(batch): lags for batch, lags in self.record.items()}
        return {f"lags.{self.place}": record} if record else {}

    def recall(self, facts: Mapping[str, Any]) -> None:
        """Restore the recorded lags, to continue the record."""
        found = {} if self.combine.chosen else facts.get(f"lags.{self.place}", {})
        self.record = {int(batch): list(lags) for batch, lags in found.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `copies` returned, or else start from the newest weights; no wave may be in transit.

        Args:
            saved: by kind and name of the parameter, all or none.
        """
        known = {name: saved[f"{COMMON}/{name}"] for name in self.model.views if f"{COMMON}/{name}" in saved}
        self.model.load(known or self._store.master.views)
        self._open.clear()
        self.taken = [0] * self.width
        self._begin_wave()
        self.watch.look()

    def take_over(self) -> None:
        """Restart, as at the start of training, from the weights as they were written between two runs."""
        if self.watch.written:
            self.load({})
            self.watch.taken_over = True


def _add(weights: Buffer, update: Sequence[Tensor], share: float) -> None:
    """Add `share` times the weight changes of a pipeline."""
    for flat, change in zip(weights.flats, update, strict=True):
        flat.add_(change, alpha=share)
