"""How many bytes a graph keeps alive, exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the storages that autograd saves while a forward runs, each once.

    Saved-tensor hooks switch autograd's own check for rewritten tensors off, and cost time, so the executor uses
    this only for the first forward of each input shape.

    Args:
        known: addresses of storages that live anyway: weights, buffers.
        pack, unpack: what the graph keeps instead of a tensor, and the tensor again; the tensor itself if None.
    """

    def __init__(
        self,
        known: set[int],
        pack: Callable[[Tensor], Any] | None = None,
        unpack: Callable[[Any], Tensor] = lambda saved: saved,
    ) -> None:
        self._known = known
        self._seen: dict[int, int] = {}
        self._late: dict[int, int] = {}
        self._apart = False
        super().__init__(pack or self._pack, unpack)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        del self.pack_hook, self.unpack_hook  # a method of its own would keep this alive, and what it has seen

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add([tensor])
        return tensor.detach()  # an operation that keeps its own result would otherwise keep itself

    def add(self, tensors: Iterable[object]) -> None:
        """Count these, too."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    (self._late if self._apart else self._seen)[storage.data_ptr()] = storage.nbytes()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is saved meanwhile lives longer (`penstock.stage.autograd.split_backward`)."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum((self._seen | self._late).values())

    @property
    def late(self) -> int:
        """Those of them that live longer than the rest."""
        return sum(self._late.values())


def storage_bytes(tensors: Iterable[object], known: Collection[int]) -> int:
    """Bytes of the storages of `tensors`, each once, but for those whose addresses are known."""
    counter = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(nbytes for address, nbytes in counter.items() if address not in known)


def signature(value: object) -> tuple[object, ...]:
    """What decides how much a graph saves: shapes and types of the inputs."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in pytree.tree_leaves(value)
    )
