"""Version stores of a stage whose weights are divided among parallel pipelines, too (ZeRO-3).

A holder keeps its rows of the newest version, steps them, and has the version whole only between a GATHER and its
RELEASE. So does it keep its rows of a summed gradient; the gradient itself has memory from the first backward of a
batch to the end of its sum, or to the update where there is room for all. Between two runs the newest version is whole:
modules show it then, and users write into it. In low precision the rows are those of the master copy, which are cast
when they are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from penstock.errors import VersionError
from penstock.schedule.ir.sharding import Level
from penstock.schedule.proof.proof import StageFacts
from penstock.weights.memory.buffers import NOT_WHOLE, Buffer, Handle
from penstock.weights.memory.resized_buffer import ResizedBuffer
from penstock.weights.memory.row_shards import OwnRows
from penstock.weights.memory.sharded_buffer import DividedRows
from penstock.weights.sharded_mixed_store import ShardedMixedStore
from penstock.weights.sharded_store import ShardedStore, allocated
from penstock.weights.store import Room
from penstock.weights.updates.version_step import VersionStep

_BUFFERS = 2  # the gathered version and the gradient, of rule flush


class FullyShardedStore(ShardedStore):
    """The newest version of one stage at one of its holders, which is whole for a while; rule flush has no other."""

    @property
    def gathered(self) -> ResizedBuffer:
        """The buffer in which the newest version is whole for a while."""
        raise NotImplementedError

    def _begin_gather(self) -> list[list[Tensor]]:
        """Allocate the newest version with the own rows in it; returns its memory, by owner of the rows."""
        raise NotImplementedError

    def version_shards(self, version: int) -> list[list[Tensor]] | None:
        """Allocate a version that is to be gathered; returns its memory, by owner of what is in it.

        Raises:
            VersionError: it is not the newest one, or it is gathered already.
        """
        self._check_newest("GATHER", version)
        if self.gathered.allocated:
            state = "whole already" if self.gathered.whole else "being gathered"
            raise VersionError(
                f"{self.where}: a GATHER of version {version} of the weights comes while it is {state}; its RELEASE "
                "must come before"
            )
        return self._begin_gather()

    def is_whole(self, version: int) -> bool:  # noqa: ARG002  # there is one
        """Return whether the newest version is whole, or is being gathered."""
        return self.gathered.allocated

    def complete(self, version: int) -> None:
        """Let passes read a version, which all holders have given their rows of."""
        self._check_newest("GATHER", version)
        self.gathered.complete()

    def release(self, version: int) -> None:
        """Give the memory of a gathered version back.

        Raises:
            VersionError: it is not the newest one, or not whole.
        """
        self._check_newest("RELEASE", version)
        if not self.gathered.whole:
            raise VersionError(
                f"{self.where}: a RELEASE of version {version} of the weights comes while it is not whole"
            )
        self.gathered.free()

    def _check_newest(self, what: str, version: int) -> None:
        if version not in self.versions:
            raise VersionError(
                f"{self.where}: a {what} of version {version} of the weights, but the rows that are here are those of "
                f"version {self.newest}"
            )

    def _check_released(self, batch: int) -> None:
        """Raise an error if an update would leave old weights gathered."""
        if self.gathered.allocated:
            raise VersionError(
                f"{self.where}: the update of batch {batch} comes while version {batch} of the weights is gathered; "
                "its RELEASE must come before"
            )

    def read(self, version: int) -> Handle:
        """Claim a version.

        Raises:
            VersionError: it does not exist, or is not whole.
        """
        handle = super().read(version)
        if handle.epoch == NOT_WHOLE:
            raise VersionError(
                f"{self.where}: of version {version} of the weights only the rows of pipeline {self.shards.place} are "
                "here; no GATHER has made it whole, or it was released since"
            )
        return handle

    def _idle(self, buffer: Buffer) -> None:
        if isinstance(buffer, ResizedBuffer):
            buffer.free()


class FullyShardedExactStore(FullyShardedStore):
    """Passes read the weights that are stepped.

    Args:
        parameters, where, holders, place: as of `ShardedStore`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], where: str, holders: int, place: int) -> None:
        super().__init__(parameters, _BUFFERS, where, Level.FULL, holders, place)
        (buffer,) = self.versions.values()
        assert isinstance(buffer, ResizedBuffer)
        self._gathered = buffer
        for idle in (buffer, *self._free):
            self._idle(idle)
        whole = Buffer(self.layout, f"weights of {where}")
        whole.load(parameters)
        self.versions = {0: whole}
        self._rows = DividedRows(whole, self.layout, self.shards)

    @property
    def gathered(self) -> ResizedBuffer:
        """The buffer in which the newest version is whole for a while."""
        return self._gathered

    @property
    def rows(self) -> DividedRows:
        """The weights."""
        return self._rows

    def divide(self, whole: bool) -> None:
        """Divide parameters by rows, or `whole` ones, as the optimizer asks for; no gradient is there yet."""
        super().divide(whole)
        self._rows = DividedRows(self.master, self.layout, self.shards)

    @property
    def master_copy(self) -> None:
        """Return none: passes read what is stepped."""

    def begin_run(self) -> None:
        """Keep the own rows only: a span begins."""
        super().begin_run()
        self._gathered.rewrite()
        self.versions = {self.newest: self._gathered}

    def completed(self) -> None:
        """Show whole weights until the next span."""
        assert self._rows.whole is not None, "it was gathered"
        self.versions = {self.newest: self._rows.whole}

    def _begin_gather(self) -> list[list[Tensor]]:
        self._gathered.allocate()
        self._rows.put(self.shards.own(self._gathered.rows))
        return self.shards.flat(self._gathered.rows)

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Step the own rows, in place.

        Raises:
            VersionError: version `batch` is still gathered, which would then be the old weights.
        """
        assert not keeps_old, "weights are shards under rule flush only"
        assert step.ahead is None, "nor is there a correction"
        self._check_released(batch)
        sums = self._sums if batch == self._settled else None
        gradient = self._finish(batch)
        self._step_in_place(batch, step, sums or OwnRows(gradient, self.shards))
        self._gathered.rewrite()  # whatever was built on the version before is void
        self._put(gradient)
        self._stepped(batch)

    def restart(self, batch: int, older: int) -> Room:
        """Forget the weights, while nothing is in flight."""
        assert not older, "weights are shards under rule flush only"
        self.versions = {batch: self.master}
        self.master.rewrite()
        return Room(self.master.views)

    def resize(self, facts: StageFacts, alive: Iterable[int]) -> None:  # noqa: ARG002  # they are the same
        """Be ready for another schedule under rule flush, while nothing is in flight."""
        for buffer in (*self._free, self._gathered):
            buffer.forget_gradient()

    @property
    def storages(self) -> set[int]:
        """Return the identities of what a span has, to tell weights from activations, which may get others' places."""
        found = super().storages | self._rows.own.storages | self._gathered.storages
        return found if self._rows.whole is None else found - self._rows.whole.storages

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of rows, of what is gathered, of gradients and sums."""
        roles = {
            "weights": self._rows.own.nbytes,
            "gathered weights": self.layout.nbytes * self._gathered.allocated,
            "weights between runs": self._rows.whole_nbytes,
            "gradients": self.layout.nbytes * sum(map(allocated, self.gradients.values())),
        }
        return roles if self._sums is None else roles | {"summed gradients": self._sums.nbytes}


class FullyShardedMixedStore(FullyShardedStore, ShardedMixedStore):
    """Passes read casts, in low precision, of the weights that are stepped.

    Args:
        parameters, facts, where, level, holders, place, precision, full: as of `ShardedMixedStore`.
    """

    @property
    def gathered(self) -> ResizedBuffer:
        """The buffer in which the newest version is whole for a while."""
        (buffer,) = self.versions.values()
        assert isinstance(buffer, ResizedBuffer)
        return buffer

    def begin_run(self) -> None:
        """Keep the own rows of the master copy only: a span begins."""
        super().begin_run()
        self.gathered.free()

    def _begin_gather(self) -> list[list[Tensor]]:
        buffer = self.gathered
        buffer.allocate()
        self.master_rows.put(self.shards.own(buffer.rows))
        return self.shards.flat(buffer.rows)

    def completed(self) -> None:
        """Show whole weights until the next span, and cast them for evaluations."""
        super().completed()
        self._awake(self.gathered)
        self.refresh()

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Step the own rows of the master copy.

        Raises:
            VersionError: version `batch` is still gathered, which would then be the old weights.
        """
        assert not keeps_old, "weights are shards under rule flush only"
        self._check_released(batch)
        super().update(batch, step, keeps_old)

    def _write_own(self, buffer: Buffer) -> None:
        """Write nothing: the own rows are cast when they are gathered."""

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of what is gathered, of the master copy, of gradients and sums."""
        roles = super().bytes_by_role()
        low = roles.pop("weights")
        return roles | {
            "gathered weights": low if self.divided else 0,
            "weights between runs": roles["weights between runs"] + (0 if self.divided else low),
        }
