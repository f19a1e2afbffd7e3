"""Backwards that read older weights by choice (`backward_delays`), other ones than their forward.

As in `penstock.stage.weight_reads_newest`, weights are looked up when the backward runs; but here forward and backward
read leaves of several buffers, each parameter from a version of its own (`weights.memory.emulated_delay_buffers`). So
a graph keeps the name of a weight and the position of the tensor in it. Blocks that recompute their own forward within
the backward (torch's checkpoint) keep weights where these hooks cannot see them, so they are refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError
from penstock.schedule.ir.schedule import Copy
from penstock.stage.autograd.saved_bytes import SavedBytes, has_memory
from penstock.stage.autograd.weight_lookup_hooks import WeightLookupHooks, check_uncast
from penstock.stage.in_flight_microbatch import InFlightMicrobatch
from penstock.stage.weight_reads import ForwardWeightReads
from penstock.stage.weight_reads_newest import complex_among
from penstock.weights.memory.buffers import Handle
from penstock.weights.memory.emulated_delay_buffers import OlderVersions
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater


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
