"""Format of checkpoints: safetensors and JSON, no pickle, each either complete or absent.

    checkpoints/batch-00000100/index.json              schema, facts, checksum of every file, file of every tensor
    checkpoints/batch-00000100/stage-0.safetensors
    checkpoints/batch-00000100/stage-0.1.safetensors   what stage 0 in pipeline 1 has to itself, if it has any:
                                                       buffers, and its rows of a sharded optimizer state
    checkpoints/batch-00000100/frozen-0.safetensors    frozen parameters of stage 0, if it has any

Tensors are named after parameters (`penstock.runtime.rank.snapshot`), so a model with other stages can read them. A
checkpoint is written into a hidden folder, synced, and renamed once the index is in it; older ones are removed when a
newer one is complete, and are hidden first. Every file is checked against the index before anything of it is used.
While frozen parameters stay the same, the checkpoints of a run share their file (it has a hard link in each).
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint import index as indexes
from penstock.checks import is_whole
from penstock.errors import CheckpointError
from penstock.guarded_files import check_own_folder, fingerprint, new_file, sync_folder

SCHEMA = 1
FOLDER = "checkpoints"
_KINDS: Mapping[str, type] = MappingProxyType({"facts": dict, "extra": dict})
_PART = ".part"
_MOST_BATCHES = 10**15


class Checkpoint:
    """A complete checkpoint, whose tensors are read on demand.

    Args:
        folder: with the index and the files.
        share: (i, n) to verify the checksum of every n-th file from the i-th on; None to verify none.

    Attributes:
        files: size and SHA-256 of each file, by name.
        facts: what is the same on all stages; "values" holds optimizer state that is not tensors.
        names: of all tensors.
        extra: added by the training loop.

    Raises:
        CheckpointError: a file is missing or has changed, or the schema is another one.
    """

    def __init__(self, folder: Path, share: tuple[int, int] | None = (0, 1)) -> None:
        self.folder = folder
        index = _read_index(folder)
        self._homes: dict[str, str] = index["tensors"]
        self._files = indexes.TensorFiles(folder)
        self.names: Collection[str] = self._homes.keys()
        self.files: Mapping[str, Any] = index["files"]
        self.facts: Mapping[str, Any] = index["facts"]
        self.extra: Mapping[str, Any] = index["extra"]
        if share is not None:
            layouts: dict[str, dict[str, Any]] = {name: {} for name in index["files"]}
            for name in self._homes.keys() & index.get("layouts", {}).keys():  # earlier versions have written none
                layouts[self._homes[name]][name] = index["layouts"][name]
            for name in sorted(index["files"])[share[0] :: share[1]]:
                indexes.check_file(folder, name, index["files"][name])
                self._files.check(name, self.batch, layouts[name])

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            CheckpointError: its file does not hold it, or cannot be read any more.
        """
        return self._files.read(self._homes[name], name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            CheckpointError: as of `tensor`.
        """
        return self._files.shape(self._homes[name], name)

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Read the rows of a tensor from `first` to before `end`, and no other bytes of it.

        Raises:
            CheckpointError: as of `tensor`.
        """
        return self._files.rows(self._homes[name], name, first, end)

    @property
    def batch(self) -> int:
        """The number of batches that had been trained on."""
        return int(self.facts["batch"])


def checkpoint_folder(run: Path, batch: int) -> Path:
    """Return the folder of a checkpoint of a run."""
    return run / FOLDER / f"batch-{batch:08d}"


def partial_folder(place: Path) -> Path:
    """Return the folder that a checkpoint is in while it is being written."""
    return place.with_name(f".{place.name}{_PART}")


def checkpoints(run: Path, limit: int | None = None) -> list[Path]:
    """List the completed checkpoints of a run, of at most `limit` batches, from the oldest on.

    Of how many batches one is, its index says; its folder says so only where the index cannot be read.
    """
    found = sorted((batch_of(path), path.name, path) for path in _places(run))
    return [path for batch, _, path in found if limit is None or batch <= limit]


def _places(run: Path) -> list[Path]:
    """List the folders of the completed checkpoints of a run, by name."""
    return sorted((run / FOLDER).glob("batch-*"))


def batch_of(place: Path) -> int:
    """Return of how many batches a checkpoint is, by its index, or else by its folder; -1 if neither says so."""
    try:
        return int(_read_index(place)["facts"]["batch"])
    except CheckpointError:
        number = re.fullmatch(r"batch-([0-9]{1,18})", place.name)
        return int(number[1]) if number else -1


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
            f"none of the {len(faults)} checkpoints in {str(run / FOLDER)!r} is intact; put intact copies back, or "
            f"begin again in another folder. The newest: {faults[0]}"
        )
    return None, []


def clear_parts(run: Path) -> None:
    """Remove checkpoints that were incomplete when a run ended."""
    for path in (run / FOLDER).glob(f".batch-*{_PART}"):
        shutil.rmtree(path, ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], batch: int | None = None) -> dict[str, Any]:
    """Write a file of tensors to the disk; return its size and SHA-256 for the index.

    Args:
        path: where to.
        tensors: by name.
        batch: of how many batches they are; None if other checkpoints may have the file, too.

    Raises:
        OSError: it cannot be written.
    """
    of = {} if batch is None else {indexes.BATCH: str(batch)}
    with new_file(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"schema": str(SCHEMA), **of})
    return fingerprint(path)


def complete(place: Path, content: Mapping[str, Any]) -> None:
    """Complete a checkpoint: write the index and rename the folder."""
    part = partial_folder(place)
    indexes.write_index(part, SCHEMA, content)
    sync_folder(part)
    if place.exists():  # from before a restart from an older checkpoint
        _discard(place)
    os.rename(part, place)
    sync_folder(place.parent)


def remove_older(run: Path, newest: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to the newest, which has just been written."""
    for path in [path for path in _places(run) if path.name <= newest.name][:-keep]:
        _discard(path)


def set_aside(run: Path, chosen: Path) -> None:
    """Hide the checkpoints after the one that a run resumes from: they are damaged, and the run will write its own.

    Raises:
        CheckpointError: the folder is not writable.
    """
    found = checkpoints(run)
    for path in found[found.index(chosen) + 1 :]:
        try:
            os.rename(path, path.with_name(f".damaged-{uuid.uuid4().hex[:8]}-{path.name}"))
        except OSError as error:
            raise CheckpointError(f"cannot set the damaged {str(path)!r} aside: {error.strerror}") from None


def discard_after(run: Path, limit: int) -> None:
    """Remove the checkpoints of more than `limit` batches.

    Raises:
        CheckpointError: the folder is not writable.
    """
    kept = checkpoints(run, limit)
    for path in checkpoints(run):
        if path not in kept:
            try:
                _discard(path)
            except OSError as error:
                raise CheckpointError(f"cannot remove {str(path)!r}: {error.strerror}") from None


def _discard(place: Path) -> None:
    """Remove a checkpoint in such a way that no part of it is ever found."""
    hidden = place.with_name(f".{place.name}.old{_PART}")
    os.rename(place, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def check_folder(run: Path) -> None:
    """Make sure that the checkpoints of a run are in its own folder, and not behind a link.

    Raises:
        CheckpointError: what is a link, or no folder.
    """
    for path in (run / FOLDER, *(run / FOLDER).glob("*batch-*")):
        try:
            check_own_folder(path)
        except OSError as error:
            raise CheckpointError(f"cannot use {str(path)!r}: {error.strerror}") from None


def _read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    index = indexes.read_index(folder, SCHEMA, _KINDS)
    facts = index["facts"]
    if (
        not is_whole(facts.get("batch"))
        or facts["batch"] > _MOST_BATCHES
        or not isinstance(facts.get("values", {}), dict)
        or not isinstance(index.get("layouts", {}), dict)
    ):
        raise CheckpointError(f"{str(folder / indexes.INDEX)!r} is damaged: it does not say of how many batches it is")
    return index
