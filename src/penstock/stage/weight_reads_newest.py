"""Backwards that read the newest weights, or an estimate of those that their forward read.

Some methods keep a single version, which is updated while microbatches are in flight; backwards read its present values
(PipeMare, arXiv 1910.05124), or an estimate made from them. So graphs keep the positions of weights instead of the
weights (`penstock.stage.autograd.weight_lookup_hooks`). The version that is read was proven beforehand, and comes from
the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.errors import CapabilityError
from penstock.schedule.ir.schedule import Copy
from penstock.schedule.ir.version_rules import VersionRule
from penstock.stage.autograd.saved_bytes import SavedBytes, has_memory
from penstock.stage.autograd.weight_lookup_hooks import WeightLookupHooks, check_uncast
from penstock.stage.in_flight_microbatch import InFlightMicrobatch
from penstock.stage.weight_reads import WeightReads, claim
from penstock.weights.corrections.base import Corrector
from penstock.weights.memory.buffers import Buffer, Handle
from penstock.weights.store import VersionStore


class _TensorSlot(NamedTuple):
    """The position of a tensor in any buffer of the stage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class NewestWeightReads(WeightReads):
    """Backwards read the newest weights, or an estimate made from them tensor by tensor when a tensor is looked up.

    The estimate is newest - gap * motion, where gap is the number of updates since the forward and motion how the
    weights change per update, as the corrector measures it.

    Args:
        store, corrector: of the stage.
        recomputes_on_newest: a forward that is recomputed in a backward reads the weights of the backward, not those of
            the first forward, which may be gone.
    """

    looks_up = True

    def __init__(self, store: VersionStore, corrector: Corrector | None, recomputes_on_newest: bool) -> None:
        self._store, self._corrector, self._recomputes_on_newest = store, corrector, recomputes_on_newest
        self._positions: WeakKeyDictionary[Buffer, Callable[[Tensor], _TensorSlot | None]] = WeakKeyDictionary()
        self._flats: Mapping[torch.dtype, Tensor] = {}
        self._motion: Mapping[torch.dtype, Tensor] = {}
        self._gap = 0.0

    def forward(self, version: int, copy: Copy | None = None) -> Handle:
        """Claim the version, or its copy."""
        return claim(self._store, version, copy)

    def recompute(self, flight: InFlightMicrobatch, version: int) -> Handle:  # noqa: ARG002
        """Claim the newest version."""
        return self._store.read(version)

    def backward(self, flight: InFlightMicrobatch, batch: int, version: int, copy: Copy | None = None) -> Handle:
        """Look weights up in the version (or its copy), even in graphs made on the weights of the forward."""
        now = claim(self._store, version, copy)
        self._turn_to(now.whole, None if self._corrector is None else self._corrector.motion, version - flight.version)
        again = now if self._recomputes_on_newest else flight.weights
        if flight.recomputes_in_backward:
            flight.handle = again
        for handle in (again, flight.weights):
            self._store.accumulate(handle, batch)
        return again

    def saved_tensor_hooks(self, known: set[int], weights: Handle) -> SavedBytes:
        """Return hooks that keep the positions of weights."""
        position = self._positions.get(weights.whole)
        if position is None:
            position = self._positions[weights.whole] = _position_in(weights.whole)
        flats = {flat.dtype: flat for flat in weights.whole.flats}
        return WeightLookupHooks(known, position, partial(_placed, flats), self._tensor)

    def check_graph(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that the graph reads the weights themselves, not casts of them."""
        advice = "take a method that keeps the weights of the forward, such as stash or 2bw"
        check_uncast(result, weights, self._store.where, "the newest", advice)

    def _turn_to(self, weights: Buffer, motion: Buffer | None = None, gap: float = 0.0) -> None:
        """Make backwards read `weights - gap * motion` from now on, each tensor computed when it is looked up."""
        self._flats = {flat.dtype: flat for flat in weights.flats}
        self._motion = {} if motion is None else {flat.dtype: flat for flat in motion.flats}
        self._gap = gap if self._motion else 0.0

    def _tensor(self, place: _TensorSlot) -> Tensor:
        """Compute the tensor at a position, from the present weights."""
        found = _placed(self._flats, place)
        if not self._gap or place.dtype not in self._motion:
            return found
        return found - self._gap * _placed(self._motion, place)


def _placed(flats: Mapping[torch.dtype, Tensor], place: _TensorSlot) -> Tensor:
    """Return the tensor at a position of a buffer."""
    return flats[place.dtype].as_strided(place.shape, place.stride, place.offset)


def _position_in(weights: Buffer) -> Callable[[Tensor], _TensorSlot | None]:
    """Return a function that finds the position of a tensor in a buffer; None for tensors that are not in it."""
    dtypes = {flat.untyped_storage()._cdata: flat.dtype for flat in weights.flats}

    def place(tensor: Tensor) -> _TensorSlot | None:
        dtype = dtypes.get(tensor.untyped_storage()._cdata) if has_memory(tensor) else None
        if dtype is None or dtype != tensor.dtype:
            return None
        return _TensorSlot(dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    return place


class EstimatedWeightReads(NewestWeightReads):
    """Backwards and recomputed forwards read an estimate of the forward's weights, written to a buffer before the pass.

    Recomputed forwards need all weights at once, and in low precision weights are cast only once. If there was no
    update since the forward, the newest weights themselves are read.
    """

    def recompute(self, flight: InFlightMicrobatch, version: int) -> Handle:
        """Claim an estimate made from the newest weights."""
        return self._estimate(flight, version) or super().recompute(flight, version)

    def backward(self, flight: InFlightMicrobatch, batch: int, version: int, copy: Copy | None = None) -> Handle:
        """Look weights up in an estimate made from the newest weights."""
        estimate = self._estimate(flight, version)
        if estimate is None:
            return super().backward(flight, batch, version, copy)
        self._turn_to(estimate.whole)
        if flight.recomputes_in_backward:
            flight.handle = estimate
        self._store.accumulate(flight.weights, batch)
        return flight.weights

    def _estimate(self, flight: InFlightMicrobatch, version: int) -> Handle | None:
        gap = version - flight.version
        if not gap:
            return None
        assert self._corrector is not None
        torch.clear_autocast_cache()  # it remembers casts of leaves whose memory may change now
        return self._store.derived.estimate(version, gap, partial(self._corrector.estimate, self._store.master, gap))


def check_real(rule: VersionRule, trained: Mapping[str, Tensor], where: str) -> None:
    """Refuse complex weights where the version rule copies weights or makes backwards look them up.

    Raises:
        CapabilityError: a weight is complex.
    """
    found = complex_among(trained)
    if found is not None and (rule.rebinds or rule.copies_forward):
        raise CapabilityError(
            f"{where}: {found} is complex; version rule {rule.name!r} is offered for real parameters. Take a method "
            "whose passes read the weights of the forward, such as stash or 2bw"
        )


def complex_among(trained: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first complex parameter; None if all are real."""
    return next((name for name, weight in trained.items() if weight.is_complex()), None)
