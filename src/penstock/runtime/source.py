"""Where microbatches come from: the first stage takes inputs, the last stage targets.

Batches are any iterable; a batch is a sequence of m pairs (input, target), each made when it is asked for. The first
stage looks one batch ahead, because every message of a batch says whether another one follows. In one process both
stages share a `Source`; between processes each has its own over equal data, and a checksum that travels with the
activations catches it if they differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import DataError

Batches = Iterable[Sequence[tuple[Any, Any]]]
_CHECKED_BYTES = 1 << 16


class Sample(NamedTuple):
    """A microbatch of data, with its checksum from before any block could write into it."""

    input: Any
    target: Any
    checksum: int


class Source:
    """Random access to the batches around the pipeline's present ones.

    Args:
        batches: an iterable of batches.
        microbatches: m.
        readers: how many times each microbatch is read before it may be forgotten (2 if one process holds the first
            and the last stage and they are different).
    """

    def __init__(self, batches: Batches, microbatches: int, readers: int) -> None:
        self._batches: Iterator[Sequence[tuple[Any, Any]]] = iter(batches)
        self._m, self._readers = microbatches, readers
        self._held: dict[int, Sequence[tuple[Any, Any]]] = {}
        self._samples: dict[int, tuple[Sample, int]] = {}
        self._fetched = 0
        self._exhausted = False
        self.stopped = False
        self._asked, self._goes_on = 0, True

    def has(self, batch: int) -> bool:
        """Whether batch number `batch` of the span exists; fetches it if need be."""
        while self._fetched <= batch and not self._exhausted:
            try:
                following = next(self._batches)
            except StopIteration:
                self._exhausted = True
                break
            if not isinstance(following, Sequence):
                raise DataError(
                    f"batch {self._fetched} is a {type(following).__name__}; a batch is a list of {self._m} pairs "
                    "(input, target), or any other sequence"
                )
            if len(following) != self._m:
                found = f"batch {self._fetched} has {len(following)} microbatches"
                raise DataError(f"{found}, but the schedule takes {self._m} per batch")
            self._held[self._fetched] = following
            self._fetched += 1
        return batch < self._fetched

    def follows(self, batch: int) -> bool:
        """Whether the span goes on with batch `batch`: it exists and nobody has asked to stop.

        Decided once, since every message of a batch must say the same.
        """
        if batch > self._asked:
            self._asked, self._goes_on = batch, not self.stopped and self.has(batch)
        return self._goes_on

    def sample(self, microbatch: int) -> Sample:
        """A microbatch, counted through the span.

        Raises:
            DataError: the data ends before this microbatch, or it is not a pair.
        """
        if microbatch in self._samples:
            sample, left = self._samples.pop(microbatch)
        else:
            batch, k = divmod(microbatch, self._m)
            if not self.has(batch):
                raise DataError(
                    f"the data ends after {self._fetched} batches, but the first stage has sent batch {batch}"
                )
            sample, left = _sample(self._held[batch][k], microbatch), self._readers
            if k == self._m - 1:
                for old in [b for b in self._held if b < batch]:
                    del self._held[old]
        if left > 1:
            self._samples[microbatch] = sample, left - 1
        return sample


def _sample(pair: Any, microbatch: int) -> Sample:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"microbatch {microbatch} is not a pair (input, target) but {type(pair).__name__}")
    return Sample(pair[0], pair[1], checksum(pair))


def checksum(pair: Sequence[Any]) -> int:
    """A checksum of a microbatch: of shapes, and of the first 64 KiB of each tensor."""
    total = 0
    for leaf in pytree.tree_leaves(pair):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().reshape(-1)[: max(1, _CHECKED_BYTES // max(leaf.element_size(), 1))]
            data = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            total = zlib.crc32(data, zlib.crc32(str((leaf.dtype, tuple(leaf.shape))).encode(), total))
        else:
            total = zlib.crc32(repr(leaf).encode(), total)
    return total
