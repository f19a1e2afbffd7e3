"""The index of a folder of tensors: what it describes, the file of every tensor, size and SHA-256 of every file.

    index.json    {"schema", "sha256" (of the rest), "files": {name: {"bytes", "sha256"}}, "tensors": {name: file}, ...}

Checkpoints and trained weights have one each. It is written last, and every file is compared with it before anything
of it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from penstock.checks import is_whole
from penstock.errors import CheckpointError
from penstock.guarded_files import fingerprint, open_regular, parse_json, read_json, write_whole

INDEX = "index.json"
_MOST = 1 << 28  # bytes of an index; one of a million tensors has some 100 MiB
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)  # of a file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_OPEN = 64  # files at once
BATCH = "batch"
"""Where the metadata of a file say of how many batches it is."""
_LENGTH = 8  # bytes of the length of the header
_MOST_HEADER = 100_000_000  # bytes of a header, as in the library
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


def write_index(folder: Path, schema: int, content: Mapping[str, Any]) -> None:
    """Write the index of a folder.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / INDEX, json.dumps({"schema": schema, "sha256": digest(content), **content}))


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an index's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_index(folder: Path, schema: int, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Read the index of a folder.

    Args:
        folder: with the index in it.
        schema: that this version writes.
        kinds: the type of every entry besides the files and tensors.

    Raises:
        CheckpointError: there is none; its schema is another one; or it is damaged, or an entry is of another type.
    """
    path = folder / INDEX
    try:
        index = read_json(path, _MOST)
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} holds no {INDEX} to read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(index, dict) or index.get("schema") != schema:
        found = index.get("schema") if isinstance(index, dict) else None
        raise CheckpointError(f"{str(path)!r} has schema {found!r:.40}, this version of penstock reads {schema}")
    content = {key: value for key, value in index.items() if key not in ("schema", "sha256")}
    if index.get("sha256") != digest(content):
        raise CheckpointError(f"{str(path)!r} is damaged: its content does not match its checksum")
    fault = _fault(content, {**kinds, "files": dict, "tensors": dict})
    if fault is not None:
        raise CheckpointError(f"{str(path)!r} is damaged: {fault}")
    return content


def _fault(content: Mapping[str, Any], kinds: Mapping[str, type]) -> str | None:
    """Return what is wrong with the entries of an index; None if nothing is."""
    missing = sorted(kinds.keys() - content.keys())
    if missing:
        return f"it lacks {', '.join(missing)}"
    other = next((key for key, kind in kinds.items() if not isinstance(content[key], kind)), None)
    if other is not None:
        return f"{other} is a {type(content[other]).__name__}, not a {kinds[other].__name__}"
    for name, written in content["files"].items():
        if not _NAME.fullmatch(name) or name == INDEX:
            return f"it names {name!r:.80}, which is not a file of its folder"
        if not (
            isinstance(written, dict)
            and is_whole(written.get("bytes"))
            and isinstance(written.get("sha256"), str)
            and _SHA256.fullmatch(written["sha256"])
        ):
            return f"it does not say how large {name!r:.80} is, and its SHA-256"
    lost = next((n for n, f in content["tensors"].items() if not isinstance(f, str) or f not in content["files"]), None)
    return None if lost is None else f"it names no file of tensor {lost!r:.80}"


def check_file(folder: Path, name: str, written: Mapping[str, Any]) -> None:
    """Check that a file is the one that was written; nothing is read of one of another size.

    Raises:
        CheckpointError: it cannot be read, is no regular file, or has other content.
    """
    path = folder / name
    try:
        with open_regular(path):
            size = path.stat().st_size
        found = {"bytes": size} if size != written["bytes"] else fingerprint(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    if found != {"bytes": written["bytes"], "sha256": written["sha256"]}:
        what = f"{size} of {written['bytes']} bytes" if size != written["bytes"] else "other content"
        raise CheckpointError(f"{str(path)!r} is damaged: it has {what}")


class TensorFiles:
    """Reads tensors from the files of a folder, each of which stays open as long as this object lives.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = lru_cache(_MOST_OPEN)(partial(_open, folder))

    def check(self, file: str, batch: int, layouts: Mapping[str, Any]) -> None:
        """Check that a file is of a checkpoint of `batch`, and has these tensors.

        Args:
            file: which; one that does not say of how many batches it is may be of any.
            batch: the number of batches.
            layouts: type and shape of each tensor, by name.

        Raises:
            CheckpointError: it is of another checkpoint, or a tensor is missing or has another type or shape.
        """
        with self._explained(file, "the header"):
            metadata = self._opened(file).metadata
            said = metadata.get(BATCH) if isinstance(metadata, dict) else None
            if said not in (None, str(batch)):
                raise ValueError(f"the file is of another checkpoint, after {said!r:.40} batches, not after {batch}")
        for name, layout in layouts.items():
            with self._explained(file, name):
                if (found := self._opened(file).layout(name)) != layout:
                    raise ValueError(f"it is {found!r:.100}, and by the index {layout!r:.100}")

    def read(self, file: str, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: its file does not hold it, or cannot be read.
        """
        with self._explained(file, name):
            return self._opened(file).tensor(name)

    def rows(self, file: str, name: str, first: int, end: int) -> Tensor:
        """Read the rows of a tensor from `first` to before `end`, and no more of it.

        Raises:
            CheckpointError: as of `read`.
        """
        with self._explained(file, name):
            return self._opened(file).rows(name, first, end)

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read.

        Raises:
            CheckpointError: as of `read`.
        """
        with self._explained(file, name):
            return self._opened(file).shape(name)

    @contextmanager
    def _explained(self, file: str, name: str) -> Iterator[None]:
        """Say which tensor of which file cannot be read."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {name!r:.200} from {str(self._folder / file)!r}: {error}") from None


def _open(folder: Path, file: str) -> TensorFile:
    """Open a file of tensors."""
    return TensorFile(folder / file)


# Reads tensors of one safetensors file, whole or some rows of them, and nothing else of the file.
#
# The file consists of the length of its header (8 bytes), the header (JSON: type, shape and place of every tensor), and
# the numbers, row by row. So rows of a tensor are a range of bytes. The library maps files into memory instead, whose
# pages are read in blocks, count as memory of the process, and end it where a file has become shorter.


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
        if length > min(_MOST_HEADER, size - _LENGTH):
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
