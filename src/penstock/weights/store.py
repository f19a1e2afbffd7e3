"""The version store of one stage, which maps versions and gradients to buffers.

The store has exactly as many buffers as the schedule's proof derived. After each action the state of the schedule
(`penstock.schedule.stage_state`) determines which versions are alive, and the store frees the rest. Gradients of
a batch accumulate in one buffer, in microbatch order; with rotating updates the new version is written over that
gradient, parameter by parameter, so that under 2bw three buffers hold two versions and a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import VersionError
from penstock.schedule.proof.proof import StageFacts
from penstock.weights.memory.buffers import Buffer, Handle, Layout
from penstock.weights.memory.derived_copies import DerivedCopies
from penstock.weights.memory.row_shards import Steppable
from penstock.weights.memory.user_parameter_hooks import ParameterHooks
from penstock.weights.updates.version_step import VersionStep


class Room(NamedTuple):
    """Memory for the weights of a stage that are to replace those in its store, by name.

    Attributes:
        newest: for the newest ones, as the optimizer steps them.
        older: for what passes read of the versions before; the newest of them first.
        ahead: for what passes read of the newest version, if that is something else.
        older_rows: of the versions before there is room for the own rows only.
    """

    newest: Mapping[str, Tensor]
    older: Sequence[Mapping[str, Tensor]] = ()
    ahead: Mapping[str, Tensor] | None = None
    older_rows: bool = False


class VersionStore:
    """The versions and gradients of the trained parameters of one stage.

    Args:
        parameters: canonical name -> initial value (version 0).
        buffers: number of parameter-sized buffers, as proven.
        where: name of the stage for error messages, such as "stage 0 on rank 0".
        copies: number of derived copies alive at once, as proven.

    Attributes:
        hooks: of the user, on the parameters.
        derived: copies that are made of the weights.
        reads_ahead: passes read predictions, which updates make; `versions` has these, `master` the newest weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor], buffers: int, where: str, copies: int = 0) -> None:
        self.layout = self._layout = Layout(parameters)  # `_layout` is that of the versions that passes read
        self.where = where
        self.hooks = ParameterHooks({}, where)
        self._free = [self._make(f"{i} of {where}") for i in range(buffers)]
        self.derived = DerivedCopies(self.layout, where, copies)
        self.reads_ahead = False
        self._weights: Buffer | None = None  # the newest, where passes read ahead of them
        self.versions: dict[int, Buffer] = {0: self._take("version 0")}
        self.gradients: dict[int, Buffer] = {}
        self.versions[0].load(parameters)

    @property
    def storages(self) -> set[int]:
        """Return the identities of all its storages, to tell weights from activations."""
        held = (*self._free, *self.versions.values(), *self.gradients.values(), *self.derived.buffers)
        held += () if self._weights is None else (self._weights,)
        return set().union(*(buffer.storages for buffer in held))

    @property
    def newest(self) -> int:
        """The newest version."""
        return max(self.versions)

    def read(self, version: int) -> Handle:
        """Claim a version.

        Raises:
            VersionError: it does not exist.
        """
        buffer = self.versions.get(version)
        if buffer is None:
            alive = ", ".join(map(str, sorted(self.versions)))
            raise VersionError(f"{self.where}: version {version} of the weights does not exist; existing: {alive}")
        return Handle(buffer, buffer.epoch, version)

    def read_ahead(self, wanted: bool) -> None:
        """Let passes read predictions instead of versions from the next update on, or versions again.

        Until updates have made predictions, passes read what the versions held; afterwards all read the newest weights.
        """
        if wanted == self.reads_ahead:
            return
        if not wanted:
            self.forget_older()
        self._keep_weights(wanted)
        self.reads_ahead = wanted

    def _keep_weights(self, wanted: bool) -> None:
        """Give the newest weights a buffer of their own, or free it."""
        newest, self._weights = self.master, None
        if wanted:
            self._weights = Buffer(self.layout, f"newest weights of {self.where}")
            self._weights.load(newest.views)

    def accumulate(self, handle: Handle, batch: int) -> None:
        """Make the backward of a graph on `handle` add to the gradient of `batch`."""
        gradient = self.gradients.get(batch)
        if gradient is None:
            gradient = self.gradients[batch] = self._take_gradient(batch)
            gradient.begin_gradient()
        if len(gradient.sources) > 1:
            gradient.collect_sources()  # as the leaves of each go on from what they show
        if handle.buffer.gradient is not gradient:
            handle.buffer.add_to(gradient)
            handle.buffer.apply_hooks(self.hooks)
        else:
            handle.buffer.settle()

    def gradient(self, batch: int) -> Buffer:
        """Return the gradient of a batch whose backwards are all done."""
        gradient = self.gradients[batch]
        gradient.finish_gradient()
        return gradient

    def summed(self, batch: int) -> Mapping[str, Tensor]:
        """Return, by name, what this holder has of the gradient of a batch once pipelines have added theirs."""
        return self.gradient(batch).views

    def own_of(self, buffer: Buffer) -> Steppable:
        """Return what of a buffer the optimizer of this holder steps: all of it."""
        return buffer

    @property
    def own_layout(self) -> Layout:
        """The layout of what the optimizer steps."""
        return self.layout

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Create version batch + 1.

        Args:
            batch: the batch, whose gradient is complete.
            step: makes the version.
            keeps_old: version `batch` stays readable, so the new one is written over the gradient.
        """
        if step.ahead is not None:  # what passes read is written over the gradient, too
            gradient = self.versions[batch + 1] = self._finish(batch)
            step.with_forecast(self.master, gradient, gradient)
            if not keeps_old:
                self.retain(self.versions.keys() - {batch})
        elif keeps_old:
            old, new = self.rotate(batch)
            if step.factor:
                step.over_gradient(self.own_of(old), self.own_of(new))
            else:
                new.load(old.views)
        else:
            weights, gradient = self.overwrite(batch)
            step.in_place(self.own_of(weights), self.own_of(gradient))

    def rotate(self, batch: int) -> tuple[Buffer, Buffer]:
        """Turn the gradient of `batch` into the buffer of version batch+1.

        Returns:
            The buffers of version `batch` and of version batch+1; the latter still holds the gradient.
        """
        old, new = self.versions[batch], self._finish(batch)
        self.versions[batch + 1] = new
        return old, new

    def overwrite(self, batch: int) -> tuple[Buffer, Buffer]:
        """Replace version `batch` by version batch+1 in the same buffer.

        Returns:
            The buffer of the weights and that of the gradient, which is free again after the update.
        """
        gradient = self._finish(batch)
        buffer = self.versions.pop(batch)
        self.versions[batch + 1] = buffer
        self._free.append(gradient)
        return buffer, gradient

    def succeed(self, batch: int, apart: bool) -> tuple[Buffer, Buffer]:
        """Allocate version batch+1, while the gradient of `batch` stays.

        Args:
            batch: the newest version.
            apart: keep version `batch`, too.

        Returns:
            The buffers that the optimizer steps from and to.
        """
        old = self.versions[batch] if apart else self.versions.pop(batch)
        new = self.versions[batch + 1] = self._take(f"version {batch + 1}") if apart else old
        return old, new

    def publish(self, version: int) -> None:
        """Let passes read a version that the optimizer has made."""

    def release_gradient(self, batch: int) -> None:
        """Free the gradient of `batch`."""
        self._put(self._finish(batch))

    def retain(self, alive: Iterable[int]) -> None:
        """Free the buffers of all versions except those in `alive`."""
        for version in self.versions.keys() - set(alive):
            buffer = self.versions.pop(version)
            buffer.collect()
            buffer.gradient = None
            buffer.rewrite()
            self._put(buffer)

    def restart(self, batch: int, older: int) -> Room:
        """Forget all weights, while nothing is in flight; `refilled` says when others are there.

        Args:
            batch: the newest version from now on.
            older: how many versions before it there are.
        """
        self.retain(())
        self.derived.forget()
        for back in range(older + 1):
            self.versions[batch - back] = self._take(f"version {batch - back}")
            self.versions[batch - back].rewrite()
        self.master.rewrite()
        before = [self.versions[batch - back].views for back in range(1, older + 1)]
        return Room(self.master.views, before, self.versions[batch].views if self.reads_ahead else None)

    def refilled(self, *, ahead: bool) -> None:
        """Go on with what was written into the room that `restart` has made.

        Args:
            ahead: also what passes read ahead of the newest weights; else they read these.
        """
        if self.master_copy is not None and not ahead:
            self.versions[self.newest].load(self.master.views)

    def resize(self, facts: StageFacts, alive: Iterable[int]) -> None:
        """Hold as many buffers as another schedule needs, while nothing is in flight.

        Args:
            facts: the facts of the stage, as proven.
            alive: the versions to keep.
        """
        self.retain(alive)
        self._hold(facts.buffers, facts.copies)

    def _hold(self, buffers: int, copies: int) -> None:
        """Free surplus buffers and allocate missing ones; the content of derived copies is lost."""
        self.derived.resize(copies)
        spare = max(buffers - len(self.versions), 0)
        self._free = self._free[:spare]
        for buffer in (*self._free, *self.derived.buffers, *self.versions.values()):
            buffer.forget_gradient()  # which may be a buffer that is freed
        while len(self._free) < spare:
            self._free.append(self._make(f"{len(self.versions) + len(self._free)} of {self.where}"))

    def copies(self, version: int) -> dict[str, Tensor]:
        """Copy what passes read of a version that is alive, by name."""
        return {name: view.clone() for name, view in self.versions[version].views.items()}

    def newest_copies(self, copied: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
        """Copy the newest weights, as the optimizer steps them, by name.

        Args:
            copied: copies a tensor.
        """
        return {name: copied(view) for name, view in self.master.views.items()}

    @property
    def master_copy(self) -> Buffer | None:
        """The newest weights, where passes read no version of them in the same memory."""
        return self._weights

    @property
    def master(self) -> Buffer:
        """The buffer that the optimizer steps: the newest weights."""
        return self.versions[self.newest] if self.master_copy is None else self.master_copy

    @property
    def held(self) -> Mapping[str, Tensor]:
        """What is here of the newest weights, by name."""
        return self.master.views

    def refresh(self) -> None:
        """Take note that the newest weights may have been written from outside between two runs."""

    def forget_older(self) -> None:
        """Let passes that would read an older version read the newest weights, which were replaced from outside."""
        for buffer in self.versions.values():
            if buffer is not self.master:
                buffer.load(self.master.views)

    def newest_tensors(self) -> dict[str, Tensor]:
        """Return the parameters of the newest version, by name; they share its memory."""
        return dict(self.master.views)

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and idle buffers."""
        size = self.layout.nbytes
        roles = {"weights": self.versions, "gradients": self.gradients, "idle buffers": self._free}
        copies = len(self.derived.buffers)
        found = {role: size * len(held) for role, held in roles.items()} | ({"copies": size * copies} if copies else {})
        return found | ({} if self._weights is None else {"master weights": size})

    def _make(self, name: str) -> Buffer:
        """Make a buffer for a version or a gradient."""
        return Buffer(self._layout, name)

    def _take_gradient(self, batch: int) -> Buffer:
        return self._take(f"the gradient of batch {batch}")

    def _finish(self, batch: int) -> Buffer:
        """Remove and return the gradient of a batch, to which nothing is added any more."""
        gradient = self.gradients.pop(batch)
        gradient.finish_gradient()
        for buffer in gradient.sources:  # graphs may still refer to freed ones
            if buffer.gradient is gradient:
                buffer.gradient = None
        gradient.sources.clear()
        return gradient

    def _put(self, buffer: Buffer) -> None:
        """Take back a buffer that holds nothing any more."""
        self._free.append(buffer)

    def _take(self, purpose: str) -> Buffer:
        if not self._free:
            raise VersionError(
                f"{self.where}: no buffer is free for {purpose}; versions {sorted(self.versions)} and the gradients of "
                f"batches {sorted(self.gradients)} occupy them all"
            )
        return self._free.pop()
