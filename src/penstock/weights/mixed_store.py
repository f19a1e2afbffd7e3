"""The version store for training in low precision, with a float32 master copy.

Passes read versions in bfloat16 or float16, each cast once, when it is created. There is one master copy in float32,
which the optimizer steps in place, and gradients accumulate in float32. With double-buffered weights and Adam that is
24 bytes per parameter: two copies of 2, a master of 4, two gradients of 4 (one waits for its decision while the next
one accumulates) and 8 of optimizer state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from penstock.schedule.proof.proof import StageFacts
from penstock.weights.memory.buffers import Buffer, Layout
from penstock.weights.store import VersionStore
from penstock.weights.updates.version_step import VersionStep


class CastVersions(VersionStore):
    """A store whose versions are casts of the weights that the optimizer steps."""

    def refresh(self) -> None:
        """Cast the master weights again, which may have been written from outside between two runs."""
        if self.reads_ahead:
            return  # what passes read is no cast of them
        self.versions[self.newest].load(self.master.views)

    def _keep_weights(self, wanted: bool) -> None:
        """Do nothing: the master copy is there anyway."""

    def resize(self, facts: StageFacts, alive: Iterable[int]) -> None:
        """Hold as many versions, gradients and copies as another schedule needs, while nothing is in flight."""
        self.retain(alive)
        self._hold(facts.versions, facts.copies)
        self._hold_gradients(facts.gradients)

    def _hold_gradients(self, number: int) -> None:
        """Free surplus buffers for gradients, and allocate missing ones."""
        raise NotImplementedError


def low_copies(parameters: Mapping[str, Tensor], precision: torch.dtype, full: Collection[str]) -> dict[str, Tensor]:
    """Return parameters as passes read them: those in float32 cast, but for the ones in `full`."""
    return {
        name: p.detach().to(precision if p.dtype == torch.float32 and name not in full else p.dtype)
        for name, p in parameters.items()
    }


class MixedStore(CastVersions):
    """Versions in low precision, with a float32 master copy.

    Args:
        parameters: canonical name -> initial value (version 0).
        versions: number of versions alive at once, as proven.
        gradients: number of gradients alive at once, as proven.
        precision: dtype of the versions that passes read; parameters that are not float32 keep their dtype.
        where: name of the stage for error messages.
        full: parameters that keep their dtype, too.
        apart: updates may have to be repeated, so there is a second master copy to step into.
        copies: number of derived copies alive at once, as proven.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        versions: int,
        gradients: int,
        precision: torch.dtype,
        where: str,
        apart: bool = False,
        copies: int = 0,
        full: Collection[str] = (),
    ) -> None:
        super().__init__(low_copies(parameters, precision, full), versions, where, copies)
        self.low_layout, self.layout = self.layout, Layout(parameters)
        self._master = Buffer(self.layout, f"master of {where}")
        self._master.load(parameters)
        self._second = Buffer(self.layout, f"second master of {where}") if apart else None
        self._free_gradients: list[Buffer] = []
        self._hold_gradients(gradients)

    @property
    def storages(self) -> set[int]:
        """Return the identities of all its storages."""
        held = [self._master, *([] if self._second is None else [self._second]), *self._free_gradients]
        return super().storages.union(*(buffer.storages for buffer in held))

    def step_apart(self, apart: bool) -> None:
        """Allocate a second master copy to step into, or free it."""
        if not apart:
            self._second = None
        elif self._second is None:
            self._second = Buffer(self.layout, f"second master of {self.where}")

    def _hold_gradients(self, number: int) -> None:
        kept = self._free_gradients[:number]
        names = (f"gradient {i} of {self.where}" for i in range(len(kept), number))
        self._free_gradients = kept + [Buffer(self.layout, name) for name in names]

    @property
    def master_copy(self) -> Buffer:
        """The float32 master copy, which the optimizer steps."""
        return self._master

    def update(self, batch: int, step: VersionStep, keeps_old: bool) -> None:
        """Create version batch + 1: step the master copy and cast it, or what passes read ahead of it."""
        gradient = self._finish(batch)
        buffer = self._take(f"version {batch + 1}") if keeps_old else self.versions.pop(batch)
        if step.ahead is not None:
            step.with_forecast(self._master, gradient, buffer)
        else:
            step.in_place(self._master, gradient)
            buffer.load(self._master.views)
        self._free_gradients.append(gradient)
        self.versions[batch + 1] = buffer

    def succeed(self, batch: int, apart: bool) -> tuple[Buffer, Buffer]:
        """Allocate version batch+1; the optimizer steps from one master copy to the other, or in place."""
        super().succeed(batch, apart)
        old = self._master
        if apart:
            assert self._second is not None
            self._master, self._second = self._second, self._master
        return old, self._master

    def publish(self, version: int) -> None:
        """Cast the master copy, so that passes can read the version."""
        self.versions[version].load(self._master.views)

    def release_gradient(self, batch: int) -> None:
        """Free the gradient of `batch`."""
        self._free_gradients.append(self._finish(batch))

    def bytes_by_role(self) -> dict[str, int]:
        """Return the bytes of weights, master copy, gradients and idle buffers."""
        low, full = self.low_layout.nbytes, self.layout.nbytes
        copies = low * (len(self.derived.buffers))
        return {
            "weights": low * len(self.versions),
            "master weights": full * (1 if self._second is None else 2),
            "gradients": full * len(self.gradients),
            "idle buffers": low * len(self._free) + full * len(self._free_gradients),
        } | ({"copies": copies} if copies else {})

    def _take_gradient(self, batch: int) -> Buffer:
        if not self._free_gradients:
            return self._take(f"the gradient of batch {batch}")  # raises the error that lists what holds them
        return self._free_gradients.pop()
