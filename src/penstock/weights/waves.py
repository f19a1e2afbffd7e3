"""What pipelines add to each other's weights wave by wave; `penstock.schedule.methods.combine` has the equations (wsp).

At the end of a wave `push` gives what it has changed, to be sent, and room for what the others send. Once they have
come of as many waves as `due` says, `take` adds them. `pull` ends the count when the pipeline is drained.

All pipelines add the same numbers to the global model in the same order, by wave and then by pipeline, so it stays
equal without being sent. To their weights they add those of others, in that order too; their own are in already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.schedule.methods.combine import Combine
from penstock.schedule.methods.wave_lags import place_of
from penstock.weights.memory.buffers import Buffer
from penstock.weights.store import VersionStore
from penstock.weights.written_check import WrittenCheck

COMMON = "common"  # the kind of tensors that `copies` makes


@dataclass
class Wave:
    """One that not all pipelines are known to have.

    Attributes:
        updates: of each pipeline what it has changed, one flat tensor per dtype; of others, once they have come.
    """

    updates: list[list[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensors in self.updates for tensor in tensors)


class WaveWeights:
    """Of one stage of one pipeline. Waves are counted from the last drain.

    Args:
        combine: how pipelines agree.
        width: w, how many there are.
        pipeline: which of them this is.
        store: of the stage.

    Attributes:
        combine, width, pipeline: as given.
        model: W_g, as large as the weights.
        motion: there is none.
        taken: of each pipeline, how many waves the weights have.
        place: what the stage is called where lags are taken down.
        record: by batch after which a wave has ended, the lags that were taken, unless they are chosen.
        watch: notices what is written into the weights between two runs.
    """

    motion: Buffer | None = None

    def __init__(self, combine: Combine, width: int, pipeline: int, store: VersionStore, stage: str) -> None:
        self.combine, self.width, self.pipeline = combine, width, pipeline
        self.place, self.record = place_of(pipeline, stage), dict[int, list[int]]()
        self._store, self._known = store, combine.lag.get(self.place, {}) if isinstance(combine.lag, Mapping) else None
        if self._known == {}:
            raise ConfigError(f"combine: lag was not taken down at {self.place} (pipeline/stage), which is here")
        self.model = Buffer(store.layout, f"global model of {store.where}")
        self._begun = Buffer(store.layout, f"beginning of the wave of {store.where}")  # weights when it began
        self._open: deque[Wave] = deque()  # the oldest first
        self.taken = [0] * width
        self.watch = WrittenCheck(store)
        self.load({})

    @property
    def complete(self) -> int:
        """How many waves all pipelines have ended, as far as this one has taken them."""
        return min(self.taken)

    @property
    def _ended(self) -> int:
        """How many this pipeline has."""
        return self.taken[self.pipeline]

    # --- the end of a wave ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self) -> Wave:
        """The wave that ends: what this pipeline has changed, and room for what the others have."""
        master = self._store.master
        own = [now - before for now, before in zip(master.flats, self._begun.flats, strict=True)]
        updates = [own if q == self.pipeline else [torch.empty_like(t) for t in own] for q in range(self.width)]
        self._open.append(Wave(updates))
        self.taken[self.pipeline] += 1
        return self._open[-1]

    def due(self, batch: int) -> list[int]:
        """Of each pipeline, how many waves must have come now.

        Args:
            batch: after which the wave has ended.

        Raises:
            ConfigError: lags are to be those of a record that has none of this batch.
        """
        lags: Sequence[int] = self.combine.lags(self.width)
        if self._known is not None:
            if batch not in self._known:
                raise ConfigError(
                    f"combine: lag was taken down at {self.place} after batches {min(self._known)} to "
                    f"{max(self._known)}, and not after batch {batch}, where a wave has ended; begin where that run "
                    "began, and train no longer"
                )
            lags = self._known[batch]
        counts = [max(self._ended - lag, self.taken[q]) for q, lag in enumerate(lags)]
        counts[self.pipeline] = self._ended
        return counts

    def all(self) -> list[int]:
        """The same where there is no later time for those that could come later."""
        return [self._ended] * self.width

    def take_down(self, batch: int, counts: Sequence[int]) -> None:
        """Of each pipeline so many waves are taken after a batch."""
        self.record[batch] = [self._ended - count for count in counts]

    @torch.no_grad()
    def take(self, counts: Sequence[int]) -> None:
        """Add what has come: of each pipeline so many waves."""
        first = self.complete
        new = sorted((wave, q) for q, n in enumerate(counts) for wave in range(self.taken[q], n))
        if new:
            torch.clear_autocast_cache()  # it remembers casts of leaves whose memory changes now
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
        """All waves of all pipelines have been taken, which begin anew from the global model."""
        assert not self._open, "pulled with waves under way"
        self.taken = [0] * self.width
        if self.combine.agrees:
            torch.clear_autocast_cache()
            self._store.master.load(self.model.views)
            self._store.publish(self._store.newest)
            self._begin_wave()

    def _begin_wave(self) -> None:
        self._begun.load(self._store.master.views)

    # --- what it keeps ----------------------------------------------------------------------------------------------

    def begin_span(self, batches: int) -> None:
        """A span begins: between two, weights may have been written into.

        Args:
            batches: that have been trained on.
        """
        if self.combine.agrees or not batches:
            self.load({})
        else:
            self._begin_wave()

    def agrees(self, batch: int) -> bool:
        """Whether all pipelines have the same newest weights before a batch, with the pipeline drained."""
        return self.combine.agrees or batch == 0

    def bytes_by_role(self) -> dict[str, int]:
        """Bytes of what is kept, and of the waves that are under way."""
        return {
            "common model": self.model.nbytes,
            "weights before the wave": self._begun.nbytes,
            "waves": sum(wave.nbytes for wave in self._open),
        }

    def copies(self) -> dict[str, Tensor]:
        """Copies of the global model, by kind and name of the parameter, where the newest weights are not that."""
        views = {} if self.combine.agrees else self.model.views
        return {f"{COMMON}/{name}": view.clone() for name, view in views.items()}

    def facts(self) -> dict[str, Any]:
        """What was taken down of lags, by a name of its own."""
        record = {str(batch): lags for batch, lags in self.record.items()}
        return {f"lags.{self.place}": record} if record else {}

    def recall(self, facts: Mapping[str, Any]) -> None:
        """Go on taking down where `facts` ended."""
        found = {} if self.combine.chosen else facts.get(f"lags.{self.place}", {})
        self.record = {int(batch): list(lags) for batch, lags in found.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with what `copies` said, or from the newest weights; no wave is under way then.

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
        """Begin anew, as at the start of training, from what has been written into the weights between two runs."""
        if self.watch.written:
            self.load({})
            self.watch.taken_over = True


def _add(weights: Buffer, update: Sequence[Tensor], share: float) -> None:
    """Add a share of what a pipeline has changed."""
    for flat, change in zip(weights.flats, update, strict=True):
        flat.add_(change, alpha=share)
