"""Version stores of a stage whose weights are divided among parallel pipelines where batches overlap (2BW on ZeRO-3).

All versions are rows: those of the newest one, which is stepped, and those of an older one that passes still read. A
version is whole between a GATHER and its RELEASE, and two of a stage may be at once. The rows of a sum wait apart from
the gradient, whose memory is given back when the sum is there. In full precision an update writes the rows of the new
version over those of the sum: three buffers of rows are two versions and a sum, or one version and two sums. In low
precision the newest rows are those of the master copy, and of an older version its casts are kept.

A span that begins with one version reads it in place of the one before, too. Then a GATHER may name what is whole
already; it needs nothing, and the last RELEASE gives the memory back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from penstock.errors import VersionError
from penstock.weights.fully_sharded.one_version import FullyShardedStore
from penstock.weights.memory.buffers import Buffer
from penstock.weights.memory.resized_buffer import ResizedBuffer
from penstock.weights.store import Room


class ShardsOfVersions(FullyShardedStore):
    """Versions of one stage at one of its holders, each of which is whole for a while."""

    _uses: Counter[int]  # GATHERs of a version that no RELEASE has followed
    _older: dict[int, Buffer]  # the rows of versions before the newest
    _sums_of: dict[int, Buffer]  # room for the rows of sums, by batch, from its first backward to its update
    _there: set[int]  # the batches of which the sum is there

    def _begin(self) -> None:
        self._uses, self._older, self._sums_of, self._there = Counter(), {}, {}, set()

    # --- what is whole ----------------------------------------------------------------------------------------------

    def is_whole(self, version: int) -> bool:
        """Return whether a version is whole, or is being gathered."""
        return self._uses[version] > 0

    def version_shards(self, version: int) -> list[list[Tensor]] | None:
        """Allocate a version that is to be gathered; returns its memory, by owner, or None if it is whole already.

        Raises:
            VersionError: it does not exist.
        """
        self._check_exists("GATHER", version)
        self._uses[version] += 1
        if self._uses[version] > 1:
            return None
        buffer = self._buffer(version)
        buffer.allocate()
        rows, places = self._rows_of(version), self.shards.own(buffer.rows)
        with torch.no_grad():
            for name, view in rows.views.items():
                places[name].copy_(view)
        return self.shards.flat(buffer.rows)

    def complete(self, version: int) -> None:
        """Let passes read a version, which all holders have given their rows of."""
        self._check_exists("GATHER", version)
        self._buffer(version).complete()

    def release(self, version: int) -> None:
        """Give the memory of a gathered version back, unless another GATHER has named it since.

        Raises:
            VersionError: it does not exist, or is not whole.
        """
        self._check_exists("RELEASE", version)
        if not self._buffer(version).whole:
            raise VersionError(
                f"{self.where}: a RELEASE of version {version} of the weights comes while it is not whole"
            )
        self._uses[version] -= 1
        if not self._uses[version]:
            self._buffer(version).free()

    def _buffer(self, version: int) -> ResizedBuffer:
        """Return the memory in which a version is whole for a while."""
        buffer = self.versions[version]
        assert isinstance(buffer, ResizedBuffer), "a span trains"
        return buffer

    def _rows_of(self, version: int) -> Buffer:
        """Return the own rows of a version; in low precision those of the newest one are to be cast."""
        assert self.rows is not None, "all versions are rows"
        return self.rows.own if version == self.newest else self._older[version]

    def _check_exists(self, what: str, version: int) -> None:
        if version not in self.versions:
            raise VersionError(
                f"{self.where}: a {what} of version {version} of the weights, but the rows that are here are those of "
                f"{', '.join(map(str, sorted(self.versions)))}"
            )

    def retain(self, alive: Iterable[int]) -> None:
        """Free the rows of all versions except those in `alive`, the newest one, and what is still to be released."""
        unreleased = {version for version, uses in self._uses.items() if uses}  # the last pass has run already
        super().retain({*alive, self.newest} | unreleased)
        for version in self._older.keys() - self.versions.keys():
            self._drop_rows(self._older.pop(version))

    def _drop_rows(self, rows: Buffer) -> None:
        """Take back the rows of a version that nothing reads any more."""
        raise NotImplementedError

    # --- sums -------------------------------------------------------------------------------------------------------

    def keep_sums_apart(self, apart: bool, parts: int) -> None:  # noqa: ARG002  # they always are
        """Take note of the number of parts in which the gradient of a batch is added up."""
        self.keeps_sums_apart, self.parts = True, parts

    def _make_sums(self) -> None:
        """Make none: there is room for those of every batch."""

    def _take_gradient(self, batch: int) -> Buffer:
        gradient = super()._take_gradient(batch)
        self._sums_of[batch] = self._room()
        return gradient

    def _room(self) -> Buffer:
        """Return room for the rows of a sum."""
        raise NotImplementedError

    def summed(self, batch: int) -> Mapping[str, Tensor]:
        """Return, by name, the own rows of the sum of a batch, or of its gradient where none is there."""
        return self._sums_of[batch].views if batch in self._there else self.shards.own(self.gradient(batch).views)

    @torch.no_grad()
    def settle(self, batch: int) -> None:
        """Keep the own rows of the gradient of a batch, which hold the sum, and give its memory back."""
        gradient = self.gradients[batch]
        assert isinstance(gradient, ResizedBuffer)
        further, places = batch in self._there, self._sums_of[batch].views
        for name, rows in self.shards.own(gradient.views).items():
            (places[name].add_ if further else places[name].copy_)(rows)
        gradient.free()
        self._there.add(batch)

    def _take_sum(self, batch: int) -> Buffer:
        """Return the sum of a batch that is to be updated.

        Raises:
            VersionError: it is not there.
        """
        if batch not in self._there:
            raise VersionError(f"{self.where}: the update of batch {batch} comes before the sum of its gradient")
        self._there.discard(batch)
        return self._sums_of.pop(batch)

    # --- between two spans ------------------------------------------------------------------------------------------

    def end_run(self) -> list[list[Tensor]]:
        """Allocate the newest weights, which `completed` says are whole; returns their memory, by owner of the rows.

        Raises:
            VersionError: a version is still gathered.
        """
        left = sorted(version for version, uses in self._uses.items() if uses)
        if left:
            raise VersionError(
                f"{self.where}: version {left[0]} of the weights is still gathered at the end of a span; its RELEASE "
                "must come before"
            )
        self._uses.clear()
        return super().end_run()

    def forget_older(self) -> None:
        """Let passes that would read an older version read the newest weights, which were replaced from outside."""
        for version in self._older:
            self._older[version].load(self.shards.own(self.versions[self.newest].views))  # as passes read them
            self.versions[version].rewrite()

    def restart(self, batch: int, older: int) -> Room:
        """Forget all weights, while nothing is in flight; the newest version, which is whole, is `batch`."""
        self.retain(())
        newest = self.versions[self.newest]
        self.versions = {batch: newest}
        newest.rewrite()
        self.master.rewrite()
        before = []
        for back in range(1, older + 1):
            self.versions[batch - back] = self._free.pop()
            rows = self._older[batch - back] = self._new_rows()
            rows.rewrite()
            before.append(rows.views)
        return Room(self.master.views, before, older_rows=True)

    def _new_rows(self) -> Buffer:
        """Return room for the rows of an older version."""
        raise NotImplementedError

    @property
    def older_rows(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The own rows of versions before the newest, by version and name."""
        return {version: rows.views for version, rows in self._older.items()}
