"""The version store of a stage whose updates are divided among parallel pipelines, with versions that stay whole.

Each of the w pipelines steps its own rows of parameters (`penstock.weights.memory.row_shards`), so the optimizer's
state of 2 numbers per parameter with Adam takes 8/w bytes instead of 8. An update writes the own rows of the new
version, and a gather completes it in place; until then nobody may read it. With level gradients a sum over pipelines is
there only in the own rows of the gradient, which lie where they have accumulated. Under double buffering the new
version is written over them, and the gather over the rest: three buffers stay three buffers (12 + 8/w bytes).

A rank that may not have all of its gradients at full size at once keeps the rows of a sum elsewhere, 4/w bytes per
parameter, and frees the gradient until the next batch, or until the next microbatches of the same one: then there are
several REDUCEs, each of which adds a part of the sum.

Where passes read predictions, the newest weights are none of the versions: each pipeline keeps its rows of them, 4/w
bytes per parameter, and an update writes the own rows of what it predicts over the gradient. Between two runs the
newest weights are whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from penstock.errors import VersionError
from penstock.schedule.ir.sharding import Level
from penstock.schedule.proof.proof import StageFacts
from penstock.weights.memory.buffers import Buffer, Handle, Layout
from penstock.weights.memory.resized_buffer import ResizedBuffer
from penstock.weights.memory.row_shards import OwnRows, RowShards, Steppable
from penstock.weights.memory.sharded_buffer import DividedRows
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
        keeps_sums_apart: the rows of a sum lie elsewhere than its gradient, whose memory is freed then.
        parts: in how many parts the gradient of a batch is added up.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], buffers: int, where: str, level: Level, holders: int, place: int
    ) -> None:
        self.keeps_sums_apart = False
        super().__init__(parameters, buffers, where)
        self._level, self._place = level, (holders, place)
        self.shards = RowShards(self.layout, *self._place)
        self.incomplete: set[int] = set()
        self._sums: Buffer | None = None
        self._settled: int | None = None  # the batch whose sum is there
        self.parts = 1
        self._newest_rows: DividedRows | None = None  # of the newest weights, where passes read ahead of them
        self._reduced: Counter[int] = Counter()  # the parts that are being added up, or have been, by batch
        self._shut: set[int] = set()  # batches of whose gradient the last part is among them

    @property
    def splits_gradients(self) -> bool:
        """Whether a sum leaves this holder its rows only."""
        return self._level.splits_gradients

    def divide(self, whole: bool) -> None:
        """Divide parameters by rows, or `whole` ones, as the optimizer asks for; no gradient is there yet."""
        self.shards = RowShards(self.layout, *self._place, whole)
        self._sums = self._make_sums()

    # --- what is rows while a span trains, and whole between two ------------------------------------------------------

    @property
    def rows(self) -> DividedRows | None:
        """The weights that are stepped, where they are rows while a span trains; None where they stay whole."""
        return self._newest_rows

    def _keep_weights(self, wanted: bool) -> None:
        """Keep rows of the newest weights, or make a version of them; with nothing in flight."""
        newest, self._newest_rows = self.master, None
        if wanted:
            whole = Buffer(self.layout, f"newest weights of {self.where}")
            whole.load(newest.views)
            self._newest_rows = DividedRows(whole, self.layout, self.shards)

    @property
    def master_copy(self) -> Buffer | None:
        """The newest weights where no version is made of them; whole between two runs, and in an evaluation."""
        rows = self.rows
        assert rows is None or rows.whole is not None, "a span trains"
        return None if rows is None else rows.whole

    @property
    def storages(self) -> set[int]:
        """Return the identities of all its storages."""
        return super().storages | (set() if self.rows is None else self.rows.own.storages)

    @property
    def divided(self) -> bool:
        """Whether a span trains with rows of what is whole between two."""
        return self.rows is not None and self.rows.whole is None

    def begin_run(self) -> None:
        """Keep the own rows only: a span begins."""
        if self.rows is not None:
            self.rows.divide()

    def end_run(self) -> list[list[Tensor]]:
        """Allocate the newest weights, which `completed` says are whole; returns their memory, by owner of the rows."""
        return [] if self.rows is None else self.rows.begin_whole()

    def completed(self) -> None:
        """Show whole weights until the next span."""

    def is_whole(self, version: int) -> bool:  # noqa: ARG002  # all are
        """Return whether the version that an evaluation in a run reads is whole, or is being gathered."""
        return True

    def evaluation_shards(self, version: int) -> list[list[Tensor]] | None:
        """Allocate a version for an evaluation in a run, as for passes."""
        return self.version_shards(version)

    def release(self, version: int) -> None:
        """Give the memory of a gathered version back, where versions are shards."""

    def newest_tensors(self) -> dict[str, Tensor]:
        """Return the parameters of the newest version, by name; they share its memory.

        Raises:
            VersionError: it is not whole.
        """
        if self.divided:
            raise VersionError(
                f"{self.where}: the weights are sharded, and whole between two runs only; read them there"
            )
        return super().newest_tensors()

    def newest_copies(self, copied: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
        """Copy the newest weights, as the optimizer steps them, by name; the own rows where only these are kept.

        Args:
            copied: copies a tensor.
        """
        if self.rows is None:
            return super().newest_copies(copied)
        return {name: copied(view) for name, view in self.rows.present.items()}

    @property
    def held(self) -> Mapping[str, Tensor]:
        """What is here of the newest weights: the own rows, or all of them."""
        return self.rows.own.views if self.rows is not None and self.rows.whole is None else super().held

    # --- gradients --------------------------------------------------------------------------------------------------

    def keep_sums_apart(self, apart: bool, parts: int) -> None:
        """Keep the rows of sums elsewhere than the gradient from now on, or in it; with nothing in flight.

        Args:
            apart: which of the two.
            parts: in how many parts the gradient of a batch is added up.
        """
        assert apart or parts == 1, "a part frees the gradient for the next one"
        self.keeps_sums_apart, self._sums, self.parts = apart, None, parts
        self._sums = self._make_sums()
        for buffer in self._free:
            self._awake(buffer)
            self._idle(buffer)

    def _make_sums(self) -> Buffer | None:
        return Buffer(self.own_layout, f"summed gradients of {self.where}") if self.keeps_sums_apart else None

    def own_of(self, buffer: Buffer) -> Steppable:
        """Return what of a buffer the optimizer of this holder steps: its rows, of the weights that are divided."""
        return OwnRows(buffer, self.shards) if self.rows is None else self.rows.own

    @property
    def own_layout(self) -> Layout:
        """The layout of the own rows."""
        return Layout(self.shards.own(self.master.views))

    def accumulate(self, handle: Handle, batch: int) -> None:
        """Make the backward of a graph on `handle` add to the gradient of `batch`.

        Raises:
            VersionError: it is being added up, or has been.
        """
        if batch in self._shut:
            if self._reduced[batch] == self.parts:
                raise VersionError(f"{self.where}: a backward adds to the gradient of batch {batch} after its REDUCE")
            self._begin_part(handle, batch)
        super().accumulate(handle, batch)

    def _begin_part(self, handle: Handle, batch: int) -> None:
        """Begin a further part of a gradient, in the same memory."""
        gradient = self.gradients[batch]
        self._awake(gradient)
        gradient.begin_gradient()
        if handle.buffer.gradient is gradient:
            handle.whole.forget_gradient()
        self._shut.discard(batch)

    def summed(self, batch: int) -> Mapping[str, Tensor]:
        """Return, by name, what this holder has of the gradient of a batch once pipelines have added theirs."""
        if batch == self._settled and self._sums is not None:
            return self._sums.views
        views = self.gradient(batch).views
        return self.shards.own(views) if self._level.splits_gradients else views

    def gradient_shards(self, batch: int) -> list[list[Tensor]]:
        """Return the gradient of a batch whose backwards are all done, by owner of its sum, to be added up.

        Raises:
            VersionError: it is being added up, or has been.
        """
        if batch in self._shut:
            raise VersionError(f"{self.where}: a second REDUCE of the gradient of batch {batch}")
        self._reduced[batch] += 1
        self._shut.add(batch)
        return self.shards.flat(self.gradient(batch).views)

    @torch.no_grad()
    def settle(self, batch: int) -> None:
        """Keep the own rows of the gradient of a batch, which hold the sum, and give the memory of the rest back."""
        if not self.keeps_sums_apart:
            return
        gradient = self.gradients[batch]
        assert self._sums is not None
        assert isinstance(gradient, ResizedBuffer)
        further = batch == self._settled
        for name, rows in self.shards.own(gradient.views).items():
            place = self._sums.views[name]
            (place.add_ if further else place.copy_)(rows)
        gradient.free()
        self._settled = batch

    # --- versions ---------------------------------------------------------------------------------------------------

    @property
    def older_rows(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The own rows of versions before the newest, by version and name, where these are rows; else nothing."""
        return {}

    def version_shards(self, version: int) -> list[list[Tensor]] | None:
        """Return the memory of a version that is to be completed, by owner of what is in it; None if it is whole."""
        return self.shards.flat(self.versions[version].views)

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Write the own rows of version batch + 1; `complete` says when the rest is there."""
        if step.ahead is not None:
            self._step_ahead(batch, step, keeps_old)
        elif batch == self._settled and self._sums is not None:
            gradient = self._finish(batch)
            self._step_in_place(batch, step, self._sums)
            self._put_gradient(gradient)
        else:
            super().update(batch, step, keeps_old)
        self._stepped(batch)
        self.incomplete.add(batch + 1)

    def _step_ahead(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Step the own rows of the newest weights, and write what passes read over those of the gradient."""
        assert self._newest_rows is not None
        gradient = self.versions[batch + 1] = self._finish(batch)
        rows = OwnRows(gradient, self.shards)
        step.with_forecast(self._newest_rows.own, rows, rows)
        if not keeps_old:
            self.retain(self.versions.keys() - {batch})

    def _stepped(self, batch: int) -> None:
        """Forget the sums of a batch that is updated."""
        self._shut.discard(batch)
        self._reduced.pop(batch, None)
        if batch == self._settled:
            self._settled = None

    def _step_in_place(self, batch: int, step: VersionStep, gradient: Steppable) -> None:
        """Replace version `batch` by the next one in the same buffer."""
        buffer = self.versions.pop(batch)
        step.in_place(self.own_of(buffer), gradient)
        self.versions[batch + 1] = buffer

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

    def resize(self, facts: StageFacts, alive: Iterable[int]) -> None:
        """Hold as many buffers as another schedule needs, while nothing is in flight."""
        super().resize(facts, alive)
        for buffer in self._free:
            self._idle(buffer)

    # --- memory -----------------------------------------------------------------------------------------------------

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of weights, gradients, sums and idle buffers."""
        roles, size = super().bytes_by_role(), self.layout.nbytes
        if self._newest_rows is not None:
            rows = self._newest_rows
            roles |= {"master weights": rows.own.nbytes, "weights between runs": rows.whole_nbytes}
        if self._sums is not None:
            full = sum(allocated(gradient) for gradient in self.gradients.values())
            roles |= {"gradients": size * full, "summed gradients": self._sums.nbytes}
            roles["idle buffers"] = size * sum(map(allocated, self._free))
        return roles

    def _make(self, name: str) -> Buffer:
        return ResizedBuffer(self._layout, name)

    def _idle(self, buffer: Buffer) -> None:
        """Give the memory of a buffer that holds nothing back, where it is not wanted at once."""
        if self.keeps_sums_apart and isinstance(buffer, ResizedBuffer):
            buffer.free()

    def _put(self, buffer: Buffer) -> None:
        self._idle(buffer)
        super()._put(buffer)

    def _put_gradient(self, buffer: Buffer) -> None:
        """Take back a gradient that has been used up."""
        self._put(buffer)

    def _take(self, purpose: str) -> Buffer:
        return self._awake(super()._take(purpose))

    @staticmethod
    def _awake(buffer: Buffer) -> Buffer:
        """Give a buffer that is to be written memory, if it has none."""
        if isinstance(buffer, ResizedBuffer) and not buffer.allocated:
            buffer.allocate()
            buffer.complete()
        return buffer


def allocated(buffer: Buffer) -> bool:
    """Return whether a buffer has its memory."""
    return not isinstance(buffer, ResizedBuffer) or buffer.allocated
