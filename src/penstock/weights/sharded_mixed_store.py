"""Stores for training in low precision where parallel pipelines divide updates, or weights, too.

Passes read versions in bfloat16 or float16. The master copy in float32, which the optimizer steps, is rows while a span
trains: 4/w bytes per parameter. An update casts the own rows of it into the new version, and a gather completes that,
in 2 bytes per number. With double-buffered weights, Adam and level gradients that is 8 + 16/w bytes per parameter:
two versions of 2, one gradient of 4, and master, moments and a sum of 4/w each. Between two runs the master is whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from penstock.schedule.ir.sharding import Level
from penstock.schedule.proof.proof import StageFacts
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.memory.resized_buffer import ResizedBuffer
from penstock.weights.memory.row_shards import OwnRows
from penstock.weights.memory.sharded_buffer import DividedRows
from penstock.weights.mixed_store import CastVersions, low_copies
from penstock.weights.sharded_store import ShardedStore, allocated
from penstock.weights.updates.version_step import VersionStep


class ShardedMixedStore(CastVersions, ShardedStore):
    """Versions in low precision, whole, with rows of a float32 master copy.

    Args:
        parameters, level, where, holders, place: as of `ShardedStore`.
        facts: of the stage, as proven.
        precision, full: as of `penstock.weights.mixed_store.MixedStore`.

    Attributes:
        master_rows: the own rows of the master copy, and the whole of it between two runs.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        facts: StageFacts,
        where: str,
        level: Level,
        holders: int,
        place: int,
        precision: torch.dtype,
        full: Collection[str] = (),
    ) -> None:
        self._idle_gradients: list[Buffer] = []
        super().__init__(low_copies(parameters, precision, full), facts.versions, where, level, holders, place)
        self.low_layout, self.layout = self.layout, Layout(parameters)
        master = Buffer(self.layout, f"master of {where}")
        master.load(parameters)
        self.master_rows = DividedRows(master, self.layout, self.shards)
        self._hold_gradients(facts.gradients)

    def _hold_gradients(self, number: int) -> None:
        kept = self._idle_gradients[:number]
        names = (f"gradient {i} of {self.where}" for i in range(len(kept), number))
        self._idle_gradients = kept + [ResizedBuffer(self.layout, name) for name in names]
        for buffer in self._idle_gradients:
            self._idle(buffer)

    def divide(self, whole: bool) -> None:
        """Divide parameters by rows, or `whole` ones, as the optimizer asks for; no gradient is there yet."""
        super().divide(whole)
        self.master_rows = DividedRows(self.master, self.layout, self.shards)

    def keep_sums_apart(self, apart: bool, parts: int) -> None:
        """Keep the rows of sums elsewhere than the gradient from now on, or in it; with nothing in flight."""
        super().keep_sums_apart(apart, parts)
        for buffer in self._idle_gradients:
            self._idle(buffer)

    @property
    def rows(self) -> DividedRows:
        """The master weights."""
        return self.master_rows

    @property
    def storages(self) -> set[int]:
        """Return the identities of all its storages."""
        return super().storages.union(*(buffer.storages for buffer in self._idle_gradients))

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Step the own rows of the master copy, and cast them, or what passes read ahead, into the new version's."""
        settled = batch == self._settled
        gradient = self._finish(batch)
        source = self._sums if settled and self._sums is not None else OwnRows(gradient, self.shards)
        buffer = self._take(f"version {batch + 1}") if keeps_old else self.versions.pop(batch)
        self.versions[batch + 1] = buffer
        if step.ahead is not None:
            step.with_forecast(self.master_rows.own, source, OwnRows(buffer, self.shards))
            self.incomplete.add(batch + 1)
        else:
            step.in_place(self.master_rows.own, source)
            buffer.rewrite()
            self._write_own(buffer)
        self._put_gradient(gradient)
        self._stepped(batch)

    def _write_own(self, buffer: Buffer) -> None:
        """Write the own rows of the newest version, which others complete."""
        self.master_rows.put(self.shards.own(buffer.views))
        self.incomplete.add(self.newest)

    # --- memory -----------------------------------------------------------------------------------------------------

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of versions, of the master copy, of gradients and sums, and of what is idle."""
        low, size = self.low_layout.nbytes, self.layout.nbytes
        roles = {
            "weights": low * sum(map(allocated, self.versions.values())),
            "master weights": self.master_rows.own.nbytes,
            "weights between runs": self.master_rows.whole_nbytes,
            "gradients": size * sum(map(allocated, self.gradients.values())),
            "idle buffers": low * sum(map(allocated, self._free)) + size * sum(map(allocated, self._idle_gradients)),
        }
        return roles if self._sums is None else roles | {"summed gradients": self._sums.nbytes}

    def _take_gradient(self, batch: int) -> Buffer:
        if not self._idle_gradients:
            return self._take(f"the gradient of batch {batch}")  # raises the error that lists what holds them
        return self._awake(self._idle_gradients.pop())

    def _put_gradient(self, buffer: Buffer) -> None:
        self._idle(buffer)
        self._idle_gradients.append(buffer)
