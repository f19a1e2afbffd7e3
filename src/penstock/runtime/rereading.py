"""Weights that a backward looks up where delays are chosen, and other ones than those of its forward.

As `penstock.runtime.rebinding`, but forward and backward read leaves of several buffers, each parameter's from its own
version (`penstock.weights.older`). So a graph keeps of a weight its name, and where in it the tensor lies. A forward
that blocks run again within the backward (torch's checkpoint) keeps weights by itself, out of sight, so it is refused.
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
from penstock.runtime.late import Taken
from penstock.runtime.rebinding import Rebinding
from penstock.runtime.saved import SavedBytes
from penstock.weights.buffers import Handle


class _Part(NamedTuple):
    """Where a tensor lies in a parameter, whatever the version."""

    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Rereading(Rebinding):
    """The weights that the backwards of a stage read now, by name."""

    others = "those of its backward delay"
    advice = "leave backward_delays out"

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._now: Mapping[str, Tensor] = {}

    def turn_to_leaves(self, leaves: Mapping[str, Tensor]) -> None:
        """From now on backwards read these."""
        self._now = leaves

    def saved(self, known: set[int], weights: Handle) -> SavedBytes:
        """Hooks under which a forward on `weights` is run; they count what else the graph keeps."""
        return _Saved(known, weights.buffer.leaves, self)

    def no_forward(self, leaves: Iterable[Tensor]) -> AbstractContextManager[object]:
        """A backward runs meanwhile; no graph may be made of these leaves, which its forward has read.

        Raises:
            CapabilityError: one is.
        """
        return _NoForward({id(leaf) for leaf in leaves}, self._where)

    def found(self, kept: Any) -> Tensor:
        """What a graph has kept; of a weight, what is read now."""
        if not isinstance(kept, _Part):
            return super().found(kept)
        now = self._now[kept.name].detach()
        return now.as_strided(kept.shape, kept.stride, now.storage_offset() + kept.offset)


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


class _Saved(SavedBytes):
    """Keeps the names of weights, and everything else as it is."""

    def __init__(self, known: set[int], leaves: Mapping[str, Tensor], rereading: Rereading) -> None:
        self._places: dict[int, list[tuple[int, int, str]]] = {}  # per storage: begin, end and name of what is read
        for name, leaf in leaves.items():
            begin = int(leaf.storage_offset())
            places = self._places.setdefault(leaf.untyped_storage().data_ptr(), [])
            places.append((begin, begin + leaf.numel(), name))
        for places in self._places.values():
            places.sort()
        super().__init__(known, self._keep, rereading.found)

    def _keep(self, tensor: Tensor) -> Taken | _Part:
        places = self._places.get(tensor.untyped_storage().data_ptr(), ())
        offset = int(tensor.storage_offset())
        at = bisect_right(places, offset, key=lambda place: place[0]) - 1
        if at < 0 or offset >= places[at][1]:
            self.add([tensor])
            return Taken(tensor)
        begin, _, name = places[at]
        return _Part(name, offset - begin, tensor.shape, tensor.stride())
