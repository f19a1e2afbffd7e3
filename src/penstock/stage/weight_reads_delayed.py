"""Weights that a backward looks up where delays are chosen, and other ones than those of its forward.

As `penstock.stage.weight_reads_newest`, but forward and backward read leaves of several buffers, each parameter's from
its own version (`penstock.weights.memory.older_versions`). So a graph keeps of a weight its name, and where in it the
tensor lies. A forward that blocks run again within the backward (torch's checkpoint) keeps weights by itself, out of
sight, so it is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError
from penstock.schedule.ir.schedule import Copy
from penstock.stage.autograd.saved_bytes import SavedBytes
from penstock.stage.in_flight import Flight
from penstock.stage.weight_lookup_hooks import LookingUp, check_uncast
from penstock.stage.weight_reads import OfForward
from penstock.stage.weight_reads_newest import complex_among
from penstock.weights.memory.buffers import Handle
from penstock.weights.memory.older_versions import OlderVersions
from penstock.weights.optim.updater import Updater
from penstock.weights.store import VersionStore


class _Part(NamedTuple):
    """Where a tensor lies in a parameter, whatever the version."""

    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Rereading(OfForward):
    """Backwards read older weights by choice, forwards others.

    Args:
        store, updater: of the stage.
        older: the versions.
    """

    def __init__(self, store: VersionStore, updater: Updater, older: OlderVersions) -> None:
        super().__init__(store, updater, None, older)
        self._choices = older
        self._now: Mapping[str, Tensor] = {}

    def backward(self, flight: Flight, batch: int, version: int, copy: Copy | None = None) -> Handle:
        """Look weights up by name; the graphs stay on those of the forward."""
        handle = super().backward(flight, batch, version, copy)
        self._now = self._choices.read_backward(self._store.read(version))
        return handle

    def within(self, flight: Flight) -> AbstractContextManager[object]:
        """No forward may be run again where it would read other weights than the backward.

        Raises:
            CapabilityError: one is.
        """
        leaves = flight.weights.buffer.leaves
        return _NoForward({id(leaves[name]) for name in self._choices.apart & leaves.keys()}, self._store.where)

    def saved(self, known: set[int], weights: Handle) -> SavedBytes:
        """Hooks that keep names of weights."""
        return LookingUp(known, _parts(weights.buffer.leaves), self._tensor)

    def check(self, result: Any, weights: Iterable[Tensor]) -> None:
        """Make sure that it reads the weights themselves."""
        others, advice = "those of its backward delay", "leave backward_delays out"
        check_uncast(result, weights, self._store.where, others, advice)

    def _tensor(self, part: _Part) -> Tensor:
        """What is read now of a weight."""
        now = self._now[part.name].detach()
        return now.as_strided(part.shape, part.stride, now.storage_offset() + part.offset)


class _NoForward(TorchFunctionMode):
    """Refuses operations on some leaves in a graph; a plain backward makes none."""

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


def _parts(leaves: Mapping[str, Tensor]) -> Callable[[Tensor], _Part | None]:
    """Tells of tensors where they lie in which weight."""
    places: dict[int, list[tuple[int, int, str]]] = {}  # per storage: begin, end and name of what is read
    for name, leaf in leaves.items():
        begin = int(leaf.storage_offset())
        inside = places.setdefault(leaf.untyped_storage().data_ptr(), [])
        inside.append((begin, begin + leaf.numel(), name))
    for inside in places.values():
        inside.sort()

    def part(tensor: Tensor) -> _Part | None:
        inside = places.get(tensor.untyped_storage().data_ptr(), ())
        offset = int(tensor.storage_offset())
        at = bisect_right(inside, offset, key=lambda place: place[0]) - 1
        if at < 0 or offset >= inside[at][1]:
            return None
        begin, _, name = inside[at]
        return _Part(name, offset - begin, tensor.shape, tensor.stride())

    return part


def check_real_delays(trained: Mapping[str, Tensor], where: str) -> None:
    """Make sure that weights are real numbers, where backwards look them up because of delays of their own.

    Raises:
        CapabilityError: they are complex.
    """
    found = complex_among(trained)
    if found is not None:
        raise CapabilityError(
            f"{where}: {found} is complex; backward_delays are offered for real parameters. Leave them out, so that "
            "backwards read the weights of their forward"
        )
