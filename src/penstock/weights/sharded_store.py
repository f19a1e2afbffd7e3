"""The version store of a stage whose updates are divided among parallel pipelines, with versions that stay whole.

Each of the w pipelines steps its own rows of parameters (`penstock.weights.memory.row_shards`), so the optimizer's
state of 2 numbers per parameter with Adam takes 8/w bytes instead of 8. An update writes the own rows of the new
version, and a gather completes it in place; until then nobody may read it. With level gradients a sum over pipelines is
there only in the own rows of the gradient, which lie where they have accumulated. Under double buffering the new
version is written over them, and the gather over the rest: three buffers stay three buffers (12 + 8/w bytes).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.errors import VersionError
from penstock.schedule.ir.sharding import Level
from penstock.weights.memory.buffers import Buffer, Handle, Layout
from penstock.weights.memory.row_shards import OwnRows, RowShards
from penstock.weights.store import VersionStore
from penstock.weights.updates.version_step import VersionStep


class ShardedStore(VersionStore):
    """The versions and gradients of one stage at one of its holders.

    Args:
        parameters, buffers, where: as of `VersionStore`.
        level: what is split: optimizer states, or the sums of gradients as well.
        holders: w, the pipelines that hold the same weights.
        place: which of them this is.

    Attributes:
        shards: who owns which rows.
        incomplete: the versions of which only the own rows are there.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], buffers: int, where: str, level: Level, holders: int, place: int
    ) -> None:
        super().__init__(parameters, buffers, where)
        self._level, self._place = level, (holders, place)
        self.shards = RowShards(self.layout, *self._place)
        self.incomplete: set[int] = set()

    def divide(self, whole: bool) -> None:
        """Divide parameters by rows, or `whole` ones, as the optimizer asks for."""
        self.shards = RowShards(self.layout, *self._place, whole)

    def own_of(self, buffer: Buffer) -> OwnRows:
        """Return what of a buffer the optimizer of this holder steps: its rows."""
        return OwnRows(buffer, self.shards)

    @property
    def own_layout(self) -> Layout:
        """The layout of the own rows."""
        return Layout(self.shards.own(self.master.views))

    def summed(self, batch: int) -> Mapping[str, Tensor]:
        """Return, by name, what this holder has of the gradient of a batch once pipelines have added theirs."""
        views = self.gradient(batch).views
        return self.shards.own(views) if self._level.splits_gradients else views

    def gradient_shards(self, batch: int) -> list[list[Tensor]]:
        """Return the gradient of a batch whose backwards are all done, by owner of its sum."""
        return self.shards.flat(self.gradient(batch).views)

    def version_shards(self, version: int) -> list[list[Tensor]]:
        """Return the memory of a version that is to be completed, by owner of what is in it."""
        return self.shards.flat(self.versions[version].views)

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Write the own rows of version batch + 1; `complete` says when the rest is there."""
        super().update(batch, step, keeps_old)
        self.incomplete.add(batch + 1)

    def complete(self, version: int) -> None:
        """Let passes read a version, whose other rows have come."""
        self.incomplete.discard(version)

    def read(self, version: int) -> Handle:
        """Claim a version.

        Raises:
            VersionError: it does not exist, or only the own rows of it do.
        """
        if version in self.incomplete:
            raise VersionError(
                f"{self.where}: of version {version} of the weights only the rows of pipeline {self.shards.place} are "
                "there; the gather that completes it is not over"
            )
        return super().read(version)
