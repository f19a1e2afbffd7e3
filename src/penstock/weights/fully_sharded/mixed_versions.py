"""Versions as rows in low precision: those of the newest are the master copy's, of an older one its casts are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from penstock.schedule.ir.sharding import Level
from penstock.schedule.proof.proof import StageFacts
from penstock.weights.fully_sharded.versions import ShardsOfVersions
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.memory.resized_buffer import ResizedBuffer
from penstock.weights.sharded_mixed_store import ShardedMixedStore
from penstock.weights.sharded_store import allocated
from penstock.weights.updates.version_step import VersionStep


class MixedShardsOfVersions(ShardsOfVersions, ShardedMixedStore):
    """Passes read casts, in low precision, of the weights that are stepped.

    Args:
        parameters, facts, where, level, holders, place, precision, full: as of `ShardedMixedStore`.
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
        self._begin()
        self._numbers = facts.versions, facts.gradients
        super().__init__(parameters, facts, where, level, holders, place, precision, full)
        for idle in self._free:
            self._idle(idle)
        self.divide(whole=False)

    def divide(self, whole: bool) -> None:
        """Divide parameters by rows, or `whole` ones, as the optimizer asks for; no gradient is there yet."""
        super().divide(whole)
        self._hold_rows()

    def _hold_rows(self) -> None:
        """Make room for the rows of older versions and of sums, while no sum is there."""
        versions, gradients = self._numbers
        low = Layout(self.shards.own(self.versions[self.newest].views))
        self._spare = self._rooms(low, f"older rows of {self.where}", versions - 1 - len(self._older))
        self._spare_sums = self._rooms(self.own_layout, f"summed gradients of {self.where}", gradients)

    def _rooms(self, layout: Layout, name: str, number: int) -> list[Buffer]:
        """Return room for rows, without memory."""
        made: list[Buffer] = [ResizedBuffer(layout, name) for _ in range(number)]
        for buffer in made:
            self._idle(buffer)
        return made

    def _drop_rows(self, rows: Buffer) -> None:
        self._idle(rows)
        self._spare.append(rows)

    def _new_rows(self) -> Buffer:
        return self._awake(self._spare.pop())

    def _room(self) -> Buffer:
        return self._awake(self._spare_sums.pop())

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Keep the own rows of version `batch`, cast, and step those of the master copy."""
        assert keeps_old, "under rule double-buffer"
        assert step.ahead is None, "there is no correction"
        sums, gradient, rows = self._take_sum(batch), self._finish(batch), self._new_rows()
        rows.load(self.master_rows.own.views)
        self._older[batch] = rows
        step.in_place(self.master_rows.own, sums)
        buffer = self.versions[batch + 1] = self._free.pop()
        buffer.rewrite()
        self._put_gradient(gradient)
        self._idle(sums)
        self._spare_sums.append(sums)
        self._stepped(batch)

    def begin_run(self) -> None:
        """Keep the own rows only: a span begins."""
        super().begin_run()
        self._idle(self.versions[self.newest])

    def completed(self) -> None:
        """Show whole weights until the next span, and cast them for evaluations."""
        super().completed()
        self._awake(self.versions[self.newest])
        self.refresh()

    def resize(self, facts: StageFacts, alive: Iterable[int]) -> None:
        """Hold as many buffers as another schedule under the same rule needs, while nothing is in flight."""
        super().resize(facts, alive)
        self._numbers = facts.versions, facts.gradients
        self._hold_rows()
        for buffer in self._free:
            self._idle(buffer)

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of rows, of what is gathered, of gradients and sums."""
        low, size, own = self.low_layout.nbytes, self.layout.nbytes, self.master_rows.own.nbytes
        return {
            "weights": sum(rows.nbytes for rows in self._older.values()),
            "master weights": own,
            "summed gradients": own * len(self._sums_of),
            "gathered weights": low * sum(map(allocated, self.versions.values())) if self.divided else 0,
            "weights between runs": self.master_rows.whole_nbytes + (0 if self.divided else low),
            "gradients": size * sum(map(allocated, self.gradients.values())),
        }
