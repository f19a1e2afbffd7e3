"""Checksums over the bits of tensors, which change however a tensor was changed.

Version counters do not tell of what is written through ``.data``, and a copy to compare with takes the memory again.
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

_SIDE = 256  # words of 8 bytes in a row; as many rows are summed at once on the CPU, in whose cache they stay
_MANY = 1 << 14  # rows that are summed at once elsewhere
_MIX = 0x9E3779B97F4A7C15 - 2**64  # as a signed number; multiples of it look random


@torch.no_grad()
def tensor_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number for each tensor, by name; another one if a bit, the type or the shape changes.

    It does not depend on where tensors lie. They are read twice, at the pace of the memory; on a device the host waits
    for it once.
    """
    sums = {name: _sum(tensor.detach()) for name, tensor in tensors.items()}
    found: dict[str, int] = {}
    for device in {one.device for one in sums.values()}:
        names = [name for name, one in sums.items() if one.device == device]
        found |= dict(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return {name: found[name] ^ crc32(f"{t.dtype} {tuple(t.shape)}".encode()) for name, t in tensors.items()}


def _sum(tensor: Tensor) -> Tensor:
    """Sum up the words of a tensor, piece by piece."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    aligned = flat[:whole] if flat.data_ptr() % 8 == 0 else flat[:whole].clone()
    most = _SIDE * (_SIDE if flat.device.type == "cpu" else _MANY)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in (*torch.split(aligned.view(torch.int64), most), flat[whole:].to(torch.int64)):
        square = piece[: piece.numel() // _SIDE * _SIDE].view(-1, _SIDE)
        for part in (square, piece[square.numel() :].view(1, -1)):
            total = total * _MIX + _mixed(part)
    return total


def _mixed(words: Tensor) -> Tensor:
    """Sum up words by rows and by columns, with a weight for each.

    The upper half of a word also counts below, as two changes of the highest bit would cancel.
    """
    words = words + (words >> 32) * _MIX
    rows, columns = words.sum(1), words.sum(0)
    return (rows * (_weights(rows) | 1)).sum() + (columns * (_weights(columns) & -2)).sum()


def _weights(sums: Tensor) -> Tensor:
    """Weights that have no relation with one another."""
    mixed = torch.arange(1, sums.numel() + 1, device=sums.device, dtype=torch.int64) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return mixed ^ (mixed >> 32)
