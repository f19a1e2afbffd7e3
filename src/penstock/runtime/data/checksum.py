"""Checksums of samples, by which ranks notice that they read other data, or that a loader has written into a batch."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.comm.p2p.trees import leaves_of

_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object, which ranks do not have in common
_CHECKED_BYTES = 1 << 16
_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32})  # types of samples that numpy has, too


def checksum(tree: Any, limit: int | None = _CHECKED_BYTES) -> int:
    """Compute a CRC-32 of shapes, plain values and the first `limit` bytes of each tensor (all bytes if None)."""
    total = 0
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor):
            total = zlib.crc32(_described(leaf.dtype, leaf.shape), total)
            total = zlib.crc32(_first_bytes(leaf, limit), total)
        else:
            total = zlib.crc32(_ADDRESS.sub("", repr(leaf)).encode(), total)
    return total


@lru_cache(maxsize=64)
def _described(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return str((dtype, tuple(shape))).encode()


def _first_bytes(tensor: Tensor, limit: int | None) -> memoryview:
    """Return the first `limit` bytes of a tensor's elements, at least of one element."""
    short = limit is None or tensor.nbytes <= limit
    if short and tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in _NUMPY:
        return (tensor.detach() if tensor.requires_grad else tensor).numpy().data
    flat = tensor.detach().reshape(-1)
    if not short and limit is not None:
        flat = flat[: max(1, limit // max(tensor.element_size(), 1))]
    return flat.cpu().contiguous().view(torch.uint8).numpy().data
