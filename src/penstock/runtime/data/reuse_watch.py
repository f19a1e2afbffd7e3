"""Notices loaders that use the memory of a batch again while passes still read it.

The first stage reads one batch ahead, and under methods without flushes later stages read a batch long after the first
one has. A loader that refills its tensors for each batch would make passes compute with the data of the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import DataError

_FIRST = 3  # batches at least whose content is compared, whether or not they share memory


class _Content(NamedTuple):
    """The versions of tensors, by autograd's counters; and a checksum for writes that it does not see."""

    versions: list[int]
    checksum: int


class _Watched(NamedTuple):
    """The tensors of a batch, those with a counter of versions, and the addresses of all."""

    tensors: list[Tensor]
    counted: list[Tensor]
    addresses: set[int]


class ReuseWatch:
    """Compares the batches under way before and after the loader makes the next one.

    Args:
        checksum: of a list of tensors; it may leave out all but their beginnings.
        keeps: how many batches before a new one passes may still read, also where all samples have been taken.
    """

    def __init__(self, checksum: Callable[[Any], int], keeps: int = 1) -> None:
        self._checksum, self._keeps = checksum, keeps
        self._batches: dict[int, _Watched] = {}
        self._before: dict[int, _Content] = {}
        self._shares = False  # memory was seen in two batches, at least one of which was under way
        self._count = 0

    def add(self, number: int, batch: Any, held: Collection[int]) -> None:
        """Watch a batch, and of the others only those that are held, or that passes may still read."""
        tensors = [tensor for tensor in batch_tensors(batch) if tensor.layout is torch.strided and not tensor.is_nested]
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._shares = self._shares or any(addresses & others.addresses for others in self._batches.values())
        self._batches = {
            other: found for other, found in self._batches.items() if other in held or other > number - self._keeps
        }
        self._batches[number] = _Watched(tensors, counted, addresses)
        self._count += 1

    def look(self) -> None:
        """Note the content of all batches that are watched, before the loader makes the next one."""
        self._before = {number: self._content(watched) for number, watched in self._batches.items()}

    def check(self) -> None:
        """Make sure that the loader has not written into them.

        Raises:
            DataError: it has.
        """
        for number, before in sorted(self._before.items(), reverse=True):
            if self._content(self._batches[number]) != before:
                raise DataError(
                    f"batch {number} was written into by the loader when it made the next one, which is read ahead, "
                    "while passes still read this one; let it make new tensors for each batch, such as\n"
                    "    batches = ((x.clone(), y.clone()) for x, y in loader)\n"
                    "    for report in pipeline.run(batches): ..."
                )

    def _content(self, watched: _Watched) -> _Content:
        versions = [tensor._version for tensor in watched.counted]
        compares = self._shares or self._count <= max(_FIRST, self._keeps)
        on_host = [tensor for tensor in watched.tensors if tensor.is_cpu] if compares else []
        return _Content(versions, self._checksum(on_host) if on_host else 0)


def batch_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree; without torch's walk, which is slow, where it is of tuples and lists."""
    if type(tree) not in (tuple, list):
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [found for part in tree for found in ((part,) if isinstance(part, Tensor) else batch_tensors(part))]
