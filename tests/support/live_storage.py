"""An independent account of tensor memory: every storage made while it watches, until it dies."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorage(TorchDispatchMode):
    """Counts the bytes of storages that operations make.

    Attributes:
        live, peak: bytes now, and the most so far.
        sizes: bytes of each storage that is alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}
        self._large = 1 << 62
        self.peak_large = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = set() if func is torch.ops.aten.lift_fresh.default else _storages((args, kwargs))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in old:  # no view, nothing in place
                self._watch(leaf)
        return out

    def watch_large(self, nbytes: int) -> None:
        """From now on note the largest number of storages of at least so many bytes."""
        self._large, self.peak_large = nbytes, self.large

    @property
    def large(self) -> int:
        """How many large storages are alive."""
        return sum(size >= self._large for size in self.sizes.values())

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        if storage.nbytes() >= self._large:
            self.peak_large = max(self.peak_large, self.large)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def _storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}
