"""The weights that the passes of a stage read: of their forward, the newest, estimates, or older ones by choice.

Between a forward and its backward (or its recomputation) the weights may have been updated. Version rules, corrections
and chosen delays say which ones the later pass reads then (`docs/asynchronous.md`, `docs/delays.md`):

- those that the forward read (`ForwardWeightReads`);
- the newest ones, or an estimate of those that the forward read (`penstock.stage.weight_reads`);
- older ones by choice (`penstock.stage.weight_reads`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError
from penstock.schedule.ir.schedule import Copy
from penstock.schedule.ir.version_rules import VersionRule
from penstock.stage.autograd.saved_bytes import SavedBytes, has_memory
from penstock.stage.autograd.weight_lookup_hooks import WeightLookupHooks, check_uncast
from penstock.stage.in_flight_microbatch import InFlightMicrobatch
from penstock.weights.corrections.base import Corrector
from penstock.weights.memory.buffers import Buffer, Handle
from penstock.weights.memory.emulated_delay_buffers import OlderVersions
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater

_NOTHING: AbstractContextManager[object] = nullcontext()


class WeightReads:
    """Decides which weights the passes of one stage read; this base class is for stages without trained weights.

    Attributes:
        looks_up: graphs keep positions instead of weights, and look these up when their backward runs
            (`saved_tensor_hooks`).
    """

    looks_up = False

    def forward(self, version: int, copy: Copy | None = None) -> Handle | None:
        """Claim the weights that a forward reads.

        Args:
            version: named by the schedule; with chosen delays the number of the batch.
            copy: a derived copy of that version, to be read instead.

        Raises:
            VersionError: they are not alive.
        """

    def recompute(self, flight: InFlightMicrobatch, version: int) -> Handle | None:
        """Claim the weights that a recomputed forward reads, given the version that the schedule names for it.

        Raises:
            VersionError: they are not alive, or not those that the first forward read where they have to be.
        """

    def backward(self, flight: InFlightMicrobatch, batch: int, version: int, copy: Copy | None = None) -> Handle | None:
        """Prepare for a backward (or one half of it): find its weights and the gradient that it adds to.

        Args:
            flight: the microbatch; if its graphs are still to be made, they will be on `flight.handle`.
            batch: the batch whose gradient is added to.
            version: named by the schedule.
            copy: a derived copy of that version, to be read instead.

        Returns:
            The weights to bind to the modules meanwhile: blocks may recompute their own forward (torch's checkpoint).

        Raises:
            VersionError: the weights have been rewritten.
        """

    def backward_context(self, flight: InFlightMicrobatch) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context in which the backward runs."""
        return _NOTHING

    def after_backward(self, flight: InFlightMicrobatch) -> None:
        """Called when the backward is over."""

    def saved_tensor_hooks(self, known: set[int], weights: Handle) -> SavedBytes | None:
        """Return the hooks under which a forward on `weights` runs; None where graphs keep the weights themselves.

        Args:
            known: identities of storages that live anyway; the hooks count what else the graph keeps.
            weights: claimed.
        """

    def check_graph(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that the backward of a graph can find its weights.

        Args:
            result: the output of the forward, in its graph.
            weights: the leaves of the weights.

        Raises:
            CapabilityError: it cannot.
        """


class ForwardWeightReads(WeightReads):
    """Backwards and recomputed forwards read the weights that the forward read, which are kept alive until then.

    Args:
        store, updater, corrector: of the stage.
        older: versions that passes read instead of the newest; None where none is delayed.
    """

    def __init__(
        self, store: VersionStore, updater: Updater, corrector: Corrector | None, older: OlderVersions | None = None
    ) -> None:
        self._store, self._updater, self._corrector, self._older = store, updater, corrector, older
        self._claimed: Handle | None = None  # by the last forward

    def forward(self, version: int, copy: Copy | None = None) -> Handle:
        """Claim the version (or its copy); most forwards read the same as the one before."""
        last = self._claimed
        if copy is None and last is not None and last.version == version:
            buffer = self._store.versions.get(version)
            if buffer is last.buffer and buffer.epoch == last.epoch:
                return last
        handle = claim(self._store, version, copy)
        if self._older is not None:
            return self._older.read(handle)
        if copy is None:
            self._claimed = handle
        return handle

    def recompute(self, flight: InFlightMicrobatch, version: int) -> Handle:
        """Claim the same weights again."""
        if version == flight.weights.version:
            flight.weights.check(f"the recomputed forward of {self._name(flight)}")
        return self.forward(version)

    def backward(
        self,
        flight: InFlightMicrobatch,
        batch: int,
        version: int,  # noqa: ARG002
        copy: Copy | None = None,  # noqa: ARG002
    ) -> Handle:
        """Make sure that the weights in the graphs are still those of the forward."""
        handle = flight.weights
        if handle.epoch != handle.buffer.epoch:
            handle.check(f"the backward of {self._name(flight)}")
        self._store.accumulate(handle, batch)
        return handle

    def after_backward(self, flight: InFlightMicrobatch) -> None:
        """Notify the corrector, while the weights of the forward are still alive."""
        if self._corrector is not None and self._corrector.compares:
            self._corrector.backward_done(self._updater, flight.weights.whole, self._store.master)

    def _name(self, flight: InFlightMicrobatch) -> str:
        return f"microbatch {flight.microbatch.k} on {self._store.where}"


def claim(store: VersionStore, version: int, copy: Copy | None) -> Handle:
    """Claim a version, or a copy derived from it.

    Raises:
        VersionError: it is not alive.
    """
    return store.read(version) if copy is None else store.derived.read(copy, version)


# Backwards that read the newest weights, or an estimate of those that their forward read.
#
# Some methods keep a single version, which is updated while microbatches are in flight; backwards read its present
# values (PipeMare, arXiv 1910.05124), or an estimate made from them. So graphs keep the positions of weights instead of
# the weights (`penstock.stage.autograd.weight_lookup_hooks`). The version that is read was proven beforehand, and comes
# from the store.


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


# Backwards that read older weights by choice (`backward_delays`), other ones than their forward.
#
# As in `penstock.stage.weight_reads`, weights are looked up when the backward runs; but here forward and backward read
# leaves of several buffers, each parameter from a version of its own (`weights.memory.emulated_delay_buffers`). So a
# graph keeps the name of a weight and the position of the tensor in it. Blocks that recompute their own forward within
# the backward (torch's checkpoint) keep weights where these hooks cannot see them, so they are refused.


class _Part(NamedTuple):
    """The position of a tensor in a parameter, whatever the version."""

    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class DelayedWeightReads(ForwardWeightReads):
    """Backwards read older weights by choice, other ones than forwards.

    Args:
        store, updater: of the stage.
        older: the older versions.
    """

    looks_up = True

    def __init__(self, store: VersionStore, updater: Updater, older: OlderVersions) -> None:
        super().__init__(store, updater, None, older)
        self._choices = older
        self._now: Mapping[str, Tensor] = {}

    def backward(self, flight: InFlightMicrobatch, batch: int, version: int, copy: Copy | None = None) -> Handle:
        """Look weights up by name; the graphs stay on the leaves of the forward."""
        handle = super().backward(flight, batch, version, copy)
        self._now = self._choices.read_backward(self._store.read(version))
        return handle

    def backward_context(self, flight: InFlightMicrobatch) -> AbstractContextManager[object]:
        """Return a context that refuses forwards recomputed by blocks: they would not read the backward's weights.

        Raises:
            CapabilityError: a block recomputes its forward.
        """
        leaves = flight.weights.buffer.leaves
        return _NoForward({id(leaves[name]) for name in self._choices.apart & leaves.keys()}, self._store.where)

    def saved_tensor_hooks(self, known: set[int], weights: Handle) -> SavedBytes:
        """Return hooks that keep the names of weights."""
        leaves = weights.buffer.leaves
        return WeightLookupHooks(known, _part_in(leaves), partial(_part_of, leaves), self._tensor)

    def check_graph(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that the graph reads the weights themselves, not casts of them."""
        others, advice = "those of its backward delay", "leave backward_delays out"
        check_uncast(result, weights, self._store.where, others, advice)

    def _tensor(self, part: _Part) -> Tensor:
        """Return a part of a weight, as the present backward reads it."""
        return _part_of(self._now, part)


class _NoForward(TorchFunctionMode):
    """Refuses differentiable operations on some leaves; a plain backward has none."""

    def __init__(self, leaves: set[int], where: str) -> None:
        super().__init__()
        self._leaves, self._where = leaves, where

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if torch.is_grad_enabled() and self._leaves.intersection(map(id, pytree.tree_leaves((args, named)))):
            raise CapabilityError(
                f"{self._where}: a block runs its forward again within its backward (torch.utils.checkpoint), so that "
                "would read the weights of the forward, not those of its backward delay; take the checkpoint out of "
                "the block, or leave backward_delays out"
            )
        return func(*args, **named)


def _part_of(weights: Mapping[str, Tensor], part: _Part) -> Tensor:
    """Return a part of a weight."""
    weight = weights[part.name].detach()
    return weight.as_strided(part.shape, part.stride, weight.storage_offset() + part.offset)


def _part_in(leaves: Mapping[str, Tensor]) -> Callable[[Tensor], _Part | None]:
    """Return a function that finds the weight that a tensor is part of, and its position there; None for others."""
    places: dict[int, list[tuple[int, int, str]]] = {}  # per storage: begin, end and name of what is read
    for name, leaf in leaves.items():
        begin = int(leaf.storage_offset())
        inside = places.setdefault(leaf.untyped_storage()._cdata, [])
        inside.append((begin, begin + leaf.numel(), name))
    for inside in places.values():
        inside.sort()

    def part(tensor: Tensor) -> _Part | None:
        if not has_memory(tensor):
            return None
        inside = places.get(tensor.untyped_storage()._cdata, ())
        offset = int(tensor.storage_offset())
        at = bisect_right(inside, offset, key=lambda place: place[0]) - 1
        if at < 0 or offset >= inside[at][1]:
            return None
        begin, _, name = inside[at]
        return _Part(name, offset - begin, tensor.shape, tensor.stride())

    return part


def check_real_delays(trained: Mapping[str, Tensor], where: str) -> None:
    """Refuse complex weights where backwards look them up because of `backward_delays`.

    Raises:
        CapabilityError: a weight is complex.
    """
    found = complex_among(trained)
    if found is not None:
        raise CapabilityError(
            f"{where}: {found} is complex; backward_delays are offered for real parameters. Leave them out, so that "
            "backwards read the weights of their forward"
        )
