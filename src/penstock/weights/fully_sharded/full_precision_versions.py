"""Versions as rows where passes read the weights that are stepped.

An update writes the rows of the new version over those of the sum, so that as many buffers of rows do as of versions
and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from penstock.schedule.ir.sharding import Level
from penstock.schedule.proof.proof import StageFacts
from penstock.weights.fully_sharded.versions import ShardsOfVersions
from penstock.weights.memory.buffers import Buffer
from penstock.weights.memory.sharded_buffer import DividedRows
from penstock.weights.sharded_store import allocated
from penstock.weights.updates.version_step import VersionStep


class ExactShardsOfVersions(ShardsOfVersions):
    """Passes read the weights that are stepped.

    Args:
        parameters, where, holders, place: as of `ShardedStore`.
        buffers: number of versions and gradients together, as proven.
    """

    def __init__(self, parameters: Mapping[str, Tensor], buffers: int, where: str, holders: int, place: int) -> None:
        self._begin()
        super().__init__(parameters, buffers, where, Level.FULL, holders, place)
        self._slot = self.versions[0]  # in which the newest version is whole for a while in a span
        for idle in (self._slot, *self._free):
            self._idle(idle)
        whole = Buffer(self.layout, f"weights of {where}")
        whole.load(parameters)
        self.versions = {0: whole}
        self.divide(whole=False)

    def divide(self, whole: bool) -> None:
        """Divide parameters by rows, or `whole` ones, as the optimizer asks for; no gradient is there yet."""
        super().divide(whole)
        self._rows = DividedRows(self.master, self.layout, self.shards)
        self._spare = [self._make_rows() for _ in self._free]

    def _make_rows(self) -> Buffer:
        return Buffer(self.own_layout, f"rows of {self.where}")

    @property
    def rows(self) -> DividedRows:
        """The newest weights."""
        return self._rows

    @property
    def master_copy(self) -> None:
        """Return none: passes read what is stepped."""

    def _drop_rows(self, rows: Buffer) -> None:
        self._spare.append(rows)

    def _room(self) -> Buffer:
        return self._spare.pop()

    def _new_rows(self) -> Buffer:
        return self._spare.pop()

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Write the own rows of version batch + 1 over those of the sum."""
        assert keeps_old, "under rule double-buffer"
        assert step.ahead is None, "there is no correction"
        old, new, buffer = self._rows.own, self._take_sum(batch), self._finish(batch)
        if step.factor:
            step.over_gradient(old, new)
        else:
            new.load(old.views)
        self._older[batch], self._rows.own = old, new
        buffer.rewrite()
        self.versions[batch + 1] = buffer
        self._stepped(batch)

    def begin_run(self) -> None:
        """Keep the own rows only: a span begins."""
        super().begin_run()
        self._slot.rewrite()
        self.versions[self.newest] = self._slot

    def completed(self) -> None:
        """Show whole weights until the next span."""
        assert self._rows.whole is not None, "it was gathered"
        self._slot = self.versions[self.newest]
        self.versions[self.newest] = self._rows.whole

    def resize(self, facts: StageFacts, alive: Iterable[int]) -> None:
        """Hold as many buffers as another schedule under the same rule needs, while nothing is in flight."""
        self.retain(alive)
        for buffer in (*self._free, *self.versions.values(), self._slot):
            buffer.forget_gradient()
        spare = facts.buffers - len(self.versions)
        del self._free[spare:], self._spare[spare:]
        self._free += [self._make(f"of {self.where}") for _ in range(spare - len(self._free))]
        self._spare += [self._make_rows() for _ in range(spare - len(self._spare))]
        for buffer in self._free:
            self._idle(buffer)

    @property
    def storages(self) -> set[int]:
        """Return the identities of what a span has, to tell weights from activations, which may get others' places."""
        held = (self._slot, *self._spare, *self._older.values(), *self._sums_of.values())
        found = super().storages.union(*(buffer.storages for buffer in held))
        return found if self._rows.whole is None else found - self._rows.whole.storages

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of rows, of what is gathered, of gradients and sums."""
        own, whole = self._rows.own.nbytes, self.layout.nbytes
        gathered = sum(allocated(buffer) for buffer in self.versions.values()) if self.divided else 0
        return {
            "weights": own * (1 + len(self._older)),
            "summed gradients": own * len(self._sums_of),
            "idle buffers": own * len(self._spare),
            "gathered weights": whole * gathered,
            "weights between runs": self._rows.whole_nbytes,
            "gradients": whole * sum(map(allocated, self.gradients.values())),
        }
