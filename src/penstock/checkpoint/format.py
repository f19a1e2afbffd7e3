"""Format of checkpoints: safetensors and JSON, no pickle, each either complete or absent.

    checkpoints/batch-00000100/index.json              schema, facts, checksum of every file, file of every tensor
    checkpoints/batch-00000100/stage-0.safetensors
    checkpoints/batch-00000100/stage-0.1.safetensors   buffers of stage 0 in pipeline 1, if it has any

Tensors are named after parameters (`penstock.runtime.rank.snapshot`), so a model with other stages can read them. A
checkpoint is written into a hidden folder, synced, and renamed once the index is in it; older ones are removed when a
newer one is complete, and are hidden first. Every file is checked against the index before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError

SCHEMA = 1
FOLDER = "checkpoints"
INDEX = "index.json"
_PART = ".part"
_BLOCK = 1 << 20  # bytes per read when hashing


class Checkpoint:
    """A complete checkpoint, whose tensors are read on demand.

    Args:
        folder: with the index and the files.
        share: (i, n) to verify the checksum of every n-th file from the i-th on; None to verify none.

    Attributes:
        facts: what is the same on all stages; "values" holds optimizer state that is not tensors.
        names: of all tensors.
        extra: added by the training loop.

    Raises:
        CheckpointError: a file is missing or has changed, or the schema is another one.
    """

    def __init__(self, folder: Path, share: tuple[int, int] | None = (0, 1)) -> None:
        self.folder = folder
        index = _read_index(folder / INDEX)
        self._homes: dict[str, str] = index["tensors"]
        self.names: Collection[str] = self._homes.keys()
        self.facts: Mapping[str, Any] = index["facts"]
        self.extra: Mapping[str, Any] = index["extra"]
        if share is not None:
            for name in sorted(index["files"])[share[0] :: share[1]]:
                _check_file(folder, name, index["files"][name])

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: its file does not hold it, or cannot be read any more.
        """
        path = self.folder / self._homes[name]
        try:
            with safe_open(path, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name} from {str(path)!r}: {error}") from None

    @property
    def batch(self) -> int:
        """The number of batches that had been trained on."""
        return int(self.facts["batch"])


def place_of(run: Path, batch: int) -> Path:
    """Return the folder of a checkpoint of a run."""
    return run / FOLDER / f"batch-{batch:08d}"


def part_of(place: Path) -> Path:
    """Return the folder that a checkpoint is in while it is being written."""
    return place.with_name(f".{place.name}{_PART}")


def checkpoints(run: Path, limit: int | None = None) -> list[Path]:
    """List the completed checkpoints of a run, of at most `limit` batches, from the oldest on."""
    found = sorted((run / FOLDER).glob("batch-*"))
    return found if limit is None else [path for path in found if path.name <= place_of(run, limit).name]


def open_newest(
    run: Path, places: Sequence[Path] | None = None, opened: Callable[[Path], Checkpoint] = Checkpoint
) -> tuple[Checkpoint | None, list[str]]:
    """Open the newest intact checkpoint of a run; also return what is wrong with the newer ones.

    Args:
        run: the run's folder.
        places: the checkpoints to choose from, from the oldest on; all if None.
        opened: opens one, or raises CheckpointError.

    Raises:
        CheckpointError: there are checkpoints, but none is intact.
    """
    faults: list[str] = []
    for path in reversed(checkpoints(run) if places is None else places):
        try:
            return opened(path), faults
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(
            f"none of the {len(faults)} checkpoints in {str(run / FOLDER)!r} is intact; the newest: {faults[0]}"
        )
    return None, []


def clear_parts(run: Path) -> None:
    """Remove checkpoints that were incomplete when a run ended."""
    for path in (run / FOLDER).glob(f".batch-*{_PART}"):
        shutil.rmtree(path, ignore_errors=True)


def write_index(place: Path, content: Mapping[str, Any]) -> None:
    """Complete a checkpoint: write the index and rename the folder."""
    part = part_of(place)
    with (part / INDEX).open("w") as file:
        json.dump({"schema": SCHEMA, "sha256": _digest(content), **content}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(part)
    if place.exists():  # from before a restart from an older checkpoint
        _discard(place)
    os.rename(part, place)
    sync_folder(place.parent)


def rotate(run: Path, newest: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to the newest, which has just been written."""
    for path in [path for path in checkpoints(run) if path.name <= newest.name][:-keep]:
        _discard(path)


def set_aside(run: Path, chosen: Path) -> None:
    """Hide the checkpoints after the one that a run resumes from: they are damaged, and the run will write its own.

    Raises:
        CheckpointError: the folder is not writable.
    """
    for path in checkpoints(run):
        if path.name > chosen.name:
            try:
                os.rename(path, path.with_name(f".damaged-{uuid.uuid4().hex[:8]}-{path.name}"))
            except OSError as error:
                raise CheckpointError(f"cannot set the damaged {str(path)!r} aside: {error.strerror}") from None


def discard_after(run: Path, limit: int) -> None:
    """Remove the checkpoints of more than `limit` batches.

    Raises:
        CheckpointError: the folder is not writable.
    """
    for path in checkpoints(run):
        if path.name > place_of(run, limit).name:
            try:
                _discard(path)
            except OSError as error:
                raise CheckpointError(f"cannot remove {str(path)!r}: {error.strerror}") from None


def _discard(place: Path) -> None:
    """Remove a checkpoint in such a way that no part of it is ever found."""
    hidden = place.with_name(f".{place.name}.old{_PART}")
    os.rename(place, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an index's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{str(path.parent)!r} is no checkpoint: {path.name}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(index, dict) or index.get("schema") != SCHEMA:
        found = index.get("schema") if isinstance(index, dict) else None
        raise CheckpointError(f"{str(path)!r} has schema {found}, this version of penstock reads {SCHEMA}")
    content = {key: value for key, value in index.items() if key not in ("schema", "sha256")}
    if index.get("sha256") != _digest(content):
        raise CheckpointError(f"{str(path)!r} is damaged: its content does not match its checksum")
    missing = {"facts", "extra", "files", "tensors"} - index.keys()
    if missing or not set(index["tensors"].values()) <= index["files"].keys():
        raise CheckpointError(f"{str(path)!r} is damaged: it lacks {', '.join(sorted(missing)) or 'files of tensors'}")
    return index


def _check_file(folder: Path, name: str, written: Mapping[str, Any]) -> None:
    """Check that a file is the one that was written."""
    path = folder / name
    if Path(name).name != name:
        raise CheckpointError(f"the index in {str(folder)!r} names {name!r}, which is not a file of its folder")
    try:
        found = fingerprint(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    if found != written:
        what = (
            f"{found['bytes']} of {written['bytes']} bytes" if found["bytes"] != written["bytes"] else "other content"
        )
        raise CheckpointError(f"{str(path)!r} is damaged: it has {what}")
