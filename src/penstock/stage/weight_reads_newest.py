"""Weights that a backward looks up when it runs, where its forward read others.

Some methods keep one version only: it is rewritten while microbatches are in flight, and their backwards read what is
there by then (PipeMare, arXiv 1910.05124), or an estimate. So a graph keeps of the weights only where they lie
(`penstock.stage.weight_lookup_hooks`). Which version is read is proven beforehand, and looked up in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import CapabilityError
from penstock.schedule.ir.rules import VersionRule
from penstock.schedule.ir.schedule import Copy
from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.in_flight import Flight
from penstock.stage.weight_lookup_hooks import LookingUp, check_uncast
from penstock.stage.weight_reads import Reading, claim
from penstock.weights.corrections.base import Corrector
from penstock.weights.memory.buffers import Buffer, Handle
from penstock.weights.store import VersionStore


class _TensorSlot(NamedTuple):
    """Where a tensor lies in any buffer of the stage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Rebinding(Reading):
    """Late passes read the weights of their moment, or an estimate that is made of them tensor by tensor.

    Args:
        store, corrector: of the stage.
        again_on_newest: a forward that is run again in a backward reads what that reads, not what it has read before,
            which may be gone.
    """

    def __init__(self, store: VersionStore, corrector: Corrector | None, again_on_newest: bool) -> None:
        self._store, self._corrector, self._again_on_newest = store, corrector, again_on_newest
        self._flats: Mapping[torch.dtype, Tensor] = {}
        self._motion: Mapping[torch.dtype, Tensor] = {}
        self._gap = 0.0

    def forward(self, version: int, copy: Copy | None = None) -> Handle:
        """Claim it."""
        return claim(self._store, version, copy)

    def recompute(self, flight: Flight, version: int) -> Handle:  # noqa: ARG002
        """Claim what is newest now."""
        return self._store.read(version)

    def backward(self, flight: Flight, batch: int, version: int, copy: Copy | None = None) -> Handle:
        """Look weights up in the version (or its copy); its graphs may still be on those of the forward."""
        now = claim(self._store, version, copy)
        self._turn_to(now.whole, None if self._corrector is None else self._corrector.motion, version - flight.version)
        again = now if self._again_on_newest else flight.weights
        if flight.remade:
            flight.handle = again
        for handle in (again, flight.weights):
            self._store.accumulate(handle, batch)
        return again

    def saved(self, known: set[int], weights: Handle) -> SavedBytes:
        """Hooks that keep of weights where they lie."""
        return LookingUp(known, _places(weights.whole), self._tensor)

    def check(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that it reads the weights themselves."""
        advice = "take a method that keeps the weights of the forward, such as stash or 2bw"
        check_uncast(result, weights, self._store.where, "the newest", advice)

    def _turn_to(self, weights: Buffer, motion: Buffer | None = None, gap: float = 0.0) -> None:
        """From now on backwards read `weights - gap * motion`, each tensor made when it is asked for."""
        self._flats = {flat.dtype: flat for flat in weights.flats}
        self._motion = {} if motion is None else {flat.dtype: flat for flat in motion.flats}
        self._gap = gap if self._motion else 0.0

    def _tensor(self, place: _TensorSlot) -> Tensor:
        """What lies at a place now."""
        found = self._flats[place.dtype].as_strided(place.shape, place.stride, place.offset)
        if not self._gap or place.dtype not in self._motion:
            return found
        motion = self._motion[place.dtype].as_strided(place.shape, place.stride, place.offset)
        return found - self._gap * motion


def _places(weights: Buffer) -> Callable[[Tensor], _TensorSlot | None]:
    """Tells of tensors where they lie in a buffer."""
    dtypes = {flat.untyped_storage().data_ptr(): flat.dtype for flat in weights.flats}

    def place(tensor: Tensor) -> _TensorSlot | None:
        dtype = dtypes.get(tensor.untyped_storage().data_ptr())
        if dtype is None or dtype != tensor.dtype:
            return None
        return _TensorSlot(dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    return place


class Estimating(Rebinding):
    """Late passes read an estimate of what their forward has read, of their moment, that is made whole beforehand.

    A forward that is run again needs it so, and in low precision weights are to be cast once. With no update since the
    forward it is the newest weights themselves.
    """

    def recompute(self, flight: Flight, version: int) -> Handle:
        """Claim an estimate of this moment."""
        return self._estimate(flight, version) or super().recompute(flight, version)

    def backward(self, flight: Flight, batch: int, version: int, copy: Copy | None = None) -> Handle:
        """Look weights up in an estimate of this moment."""
        estimate = self._estimate(flight, version)
        if estimate is None:
            return super().backward(flight, batch, version, copy)
        self._turn_to(estimate.whole)
        if flight.remade:
            flight.handle = estimate
        self._store.accumulate(flight.weights, batch)
        return flight.weights

    def _estimate(self, flight: Flight, version: int) -> Handle | None:
        gap = version - flight.version
        if not gap:
            return None
        assert self._corrector is not None
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory may change now
        return self._store.estimate(version, gap, partial(self._corrector.estimate, self._store.master, gap))


def check_real(rule: VersionRule, trained: Mapping[str, Tensor], where: str) -> None:
    """Make sure that weights are real numbers, where copies of them are made or backwards look them up.

    Raises:
        CapabilityError: they are complex.
    """
    found = complex_among(trained)
    if found is not None and (rule.rebinds or rule.copies_forward):
        raise CapabilityError(
            f"{where}: {found} is complex; version rule {rule.name!r} is offered for real parameters. Take a method "
            "whose passes read the weights of the forward, such as stash or 2bw"
        )


def complex_among(trained: Mapping[str, Tensor]) -> str | None:
    """The first parameter that is complex."""
    return next((name for name, weight in trained.items() if weight.is_complex()), None)
