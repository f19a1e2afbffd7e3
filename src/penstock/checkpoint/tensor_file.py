"""Reads tensors of one safetensors file, whole or some rows of them, and nothing else of the file.

The file consists of the length of its header (8 bytes), the header (JSON: type, shape and place of every tensor), and
the numbers, row by row. So rows of a tensor are a range of bytes. The library maps files into memory instead, whose
pages are read in blocks, count as memory of the process, and end it where a file has become shorter.
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from penstock.checks import is_whole
from penstock.guarded_files import open_regular, parse_json

_LENGTH = 8  # bytes of the length of the header
_MOST = 100_000_000  # bytes of a header, as in the library
_FLOAT8 = re.compile(r"F8_(E\dM\d)(FNUZ)?")
_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "BF16": torch.bfloat16,
        "C64": torch.complex64,
        **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
        **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
        **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    }
)


class _Entry(NamedTuple):
    """Where a tensor is in a file.

    Attributes:
        dtype, shape: of the tensor.
        first: its first byte, counted from the beginning of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int


class TensorFile:
    """A safetensors file, which stays open as long as this object lives.

    Args:
        path: of the file.

    Attributes:
        metadata: texts by name; None if there are none.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError: it is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as opened:
            self._file = os.dup(opened.fileno())
        weakref.finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        length = int.from_bytes(self._read(_LENGTH, 0), "little")
        if length > min(_MOST, size - _LENGTH):
            raise ValueError(f"its header is said to have {length} bytes, of {size} in the file")
        header = parse_json(bytes(self._read(length, _LENGTH)).decode())
        if not isinstance(header, dict):
            raise ValueError("its header is no list of tensors")
        self._header, self._start, self._end = header, _LENGTH + length, size
        self.metadata: Any = header.get("__metadata__")

    def layout(self, name: str) -> list[Any]:
        """Return type and shape of a tensor as plain values, as of `layout_of`.

        Raises:
            ValueError: the file does not hold it.
        """
        entry = self._entry(name)
        return [str(entry.dtype), list(entry.shape)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            ValueError: the file does not hold it.
        """
        return self._entry(name).shape

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            OSError: it cannot be read.
            ValueError: the file does not hold it, or has become shorter.
        """
        entry = self._entry(name)
        return self._tensor(entry.dtype, entry.shape, entry.first)

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Read rows of a tensor that has a dimension: from `first` to before `end`, as far as there are such.

        Raises:
            OSError, ValueError: as of `tensor`.
        """
        entry = self._entry(name)
        count, *rest = entry.shape
        first, end = min(first, count), min(end, count)
        size = math.prod(rest) * entry.dtype.itemsize
        return self._tensor(entry.dtype, (max(end - first, 0), *rest), entry.first + first * size)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], first: int) -> Tensor:
        """Read a tensor from the byte `first` on."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._read(size, first), dtype=dtype).view(shape)

    def _read(self, size: int, first: int) -> bytearray:
        """Read so many bytes from the byte `first` on."""
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            read = os.preadv(self._file, [rest], first)
            if not read:
                raise ValueError(f"the file ends {len(rest)} bytes too early")
            rest, first = rest[read:], first + read
        return found

    def _entry(self, name: str) -> _Entry:
        """Return where a tensor is."""
        said = self._header.get(name)
        if not isinstance(said, dict) or name == "__metadata__":
            raise ValueError("the file holds no such tensor")
        dtype, shape, ends = _dtype(said.get("dtype")), said.get("shape"), said.get("data_offsets")
        if dtype is None or not _are_whole(shape) or not _are_whole(ends) or len(ends) != 2:
            raise ValueError(f"the header says of it {said!r:.120}")
        first, end = (self._start + offset for offset in ends)
        if end - first != math.prod(shape) * dtype.itemsize or end > self._end:
            raise ValueError(f"the header gives it {end - first} bytes for shape {tuple(shape)!r:.80}")
        return _Entry(dtype, tuple(shape), first)


def layout_of(tensor: Tensor) -> list[Any]:
    """Return type and shape of a tensor as plain values."""
    return [str(tensor.dtype), list(tensor.shape)]


def _are_whole(numbers: Any) -> TypeGuard[list[int]]:
    """Whether this is a list of whole numbers that are not negative."""
    return isinstance(numbers, list) and all(map(is_whole, numbers))


def _dtype(name: Any) -> torch.dtype | None:
    """Return the type of torch that a header names; None where there is none."""
    if not isinstance(name, str):
        return None
    eight = _FLOAT8.fullmatch(name)
    if eight is None:
        return _TYPES.get(name)
    layout, kind = eight[1].lower(), (eight[2] or "").lower()
    found = getattr(torch, f"float8_{layout}{'fn' if layout == 'e4m3' and not kind else ''}{kind}", None)
    return found if isinstance(found, torch.dtype) else None
