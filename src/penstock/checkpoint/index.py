"""The index of a folder of tensors: what it describes, the file of every tensor, size and SHA-256 of every file.

    index.json    {"schema", "sha256" (of the rest), "files": {name: {"bytes", "sha256"}}, "tensors": {name: file}, ...}

Checkpoints and trained weights have one each. It is written last, and every file is compared with it before anything
of it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.tensor_file import TensorFile
from penstock.checks import is_whole
from penstock.errors import CheckpointError
from penstock.guarded_files import fingerprint, open_regular, read_json, write_whole

INDEX = "index.json"
_MOST = 1 << 28  # bytes of an index; one of a million tensors has some 100 MiB
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)  # of a file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_OPEN = 64  # files at once
BATCH = "batch"
"""Where the metadata of a file say of how many batches it is."""


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
