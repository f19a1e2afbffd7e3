"""The weights of a stage that parallel pipelines divide among them: what of them is rows, and when they are whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.errors import ConfigError
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.memory.sharded_buffer import DividedRows
from penstock.weights.optim.step_hooks import HOOKS_ON_ROWS, hooks_take_rows
from penstock.weights.sharded_store import ShardedStore


@dataclass
class ShardedWeights(TrainedWeights):
    """The weights of a stage that trains parameters, of which each pipeline updates its own rows.

    Attributes:
        store: the versions and gradients, and who owns which rows of them.
        average: as of `TrainedWeights`; also None while a span trains of which only the own rows are there.
        average_rows: its own rows, where weights are rows while a span trains, as it is then.
        pending: the factor of the last update, until the rest of its version has come.
    """

    store: ShardedStore
    average_rows: DividedRows | None = None
    pending: float = 0.0

    # --- gradients --------------------------------------------------------------------------------------------------

    def gradient_shards(self, batch: int) -> list[list[Tensor]]:
        """Return the gradient of a batch, by the pipeline that owns a shard of its sum."""
        return self.store.gradient_shards(batch)

    def settle_sum(self, batch: int) -> None:
        """Go on with a gradient whose shard of the sum is here."""
        self.store.settle(batch)

    @property
    def keeps_sums_apart(self) -> bool:
        """Whether gradients give their memory back when their sums have ended."""
        return self.store.keeps_sums_apart

    # --- versions ---------------------------------------------------------------------------------------------------

    def _stepped(self, factor: float) -> None:
        """Move the own rows of the average towards those of the new version, unless the update was skipped."""
        self.pending = factor  # the rest of the version comes later
        if factor and self.average_rows is not None and self.store.rows is not None:
            self.average_rows.own.approach(self.store.rows.own, self._towards)

    def version_shards(self, version: int) -> list[list[Tensor]] | None:
        """Return the memory of a version of which only the own shard is there, by owner; None if it is whole."""
        return self.store.version_shards(version)

    def complete(self, version: int) -> None:
        """Go on with a version whose other shards have come."""
        self.store.complete(version)
        pending, self.pending = self.pending, 0.0  # weights that are shards are gathered several times
        self._updated(pending)

    def release(self, version: int) -> None:
        """Give the memory of a gathered version back, or of what an evaluation has read."""
        self.store.release(version)

    def is_whole(self, version: int) -> bool:
        """Return whether the version that an evaluation reads is whole, or is being gathered."""
        return self.store.is_whole(version)

    def evaluation_shards(self, version: int) -> list[list[Tensor]] | None:
        """Allocate what evaluations read, where it is not whole; returns its memory, by owner of the rows."""
        return self.store.evaluation_shards(version)

    # --- spans ------------------------------------------------------------------------------------------------------

    @property
    def keeps_rows(self) -> bool:
        """Whether weights are rows while a span trains."""
        return self.store.rows is not None

    @property
    def keeps_average(self) -> bool:
        """Whether there is an average of the weights."""
        return self.average is not None or self.average_rows is not None

    def fit_average(self) -> None:
        """Keep rows of the average where weights are rows while a span trains, and all of it elsewhere."""
        rows = self.store.rows
        if (rows is None) is (self.average_rows is None):
            return
        if rows is None:
            self.average_rows = None
        elif self.average is not None:
            self.average_rows = DividedRows(self.average, self.store.layout, self.store.shards)

    def begin_run(self) -> None:
        """Begin a span of training with the own rows of weights and average."""
        self.store.begin_run()
        if self.average_rows is not None:
            self.average_rows.divide()
            self.average = None

    def end_run(self) -> list[list[Tensor]]:
        """End it: allocate the newest weights and their average."""
        parts = self.store.end_run()
        if self.average_rows is None:
            return parts
        return [[*mine, *theirs] for mine, theirs in zip(parts, self.average_rows.begin_whole(), strict=True)]

    def completed(self) -> None:
        """Show whole weights until the next span begins."""
        self.store.completed()
        pending, self.pending = self.pending, 0.0
        self._updated(pending)
        if self.average_rows is not None:
            self.average = self.average_rows.whole

    def refresh(self) -> None:
        """Adopt what was written into the newest version, and what was set in the optimizer, between two runs.

        Raises:
            ConfigError: the optimizer steps rows, and has got step hooks since it was made.
        """
        optimizer = self.updater.optimizer
        if optimizer is not None and not hooks_take_rows(optimizer):
            raise ConfigError(f"{self.store.where}: {self.updater.name} {HOOKS_ON_ROWS}")
        super().refresh()

    # --- memory -----------------------------------------------------------------------------------------------------

    def bytes_by_role(self) -> dict[str, int]:
        """Return the parameter-sized bytes by role, without the optimizer's: of what goes with sharding."""
        average = self.average if self.average_rows is None else self.average_rows
        parts = {"averaged weights": average, "correction": self.corrector}
        return self.store.bytes_by_role() | {role: part.nbytes for role, part in parts.items() if part is not None}
