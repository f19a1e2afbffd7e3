"""The file of a stage's frozen parameters, which the checkpoints of a run share while these stay the same.

Every checkpoint has the file in its own folder, as a hard link, so each is whole by itself, and the content goes with
the last of them. Snapshots say whether parameters have stayed the same, by sums over their bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open

from penstock.checkpoint import format as disk
from penstock.errors import CheckpointError
from penstock.guarded_files import open_regular
from penstock.runtime.rank.snapshot import Snapshot
from penstock.weights.memory.tensor_sums import tensor_sums

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""Of a file that is not there."""


class FrozenFile:
    """Writes the file of one stage's frozen parameters, or links to the one of an earlier checkpoint.

    Args:
        run: the run's folder.
        batch: of the checkpoint that the run goes on from, if that has such a file.
        written: the size and SHA-256 of that file.
    """

    def __init__(self, run: Path, batch: int = -1, written: Mapping[str, Any] = NOTHING) -> None:
        self._run = run
        self._sums: Mapping[str, int] | None = None  # not known of a file that this object has not written
        self._batch = batch  # of the last checkpoint that has the file
        self._written = dict(written)

    def put(self, batch: int, name: str, snapshot: Snapshot) -> dict[str, Any]:
        """Put the file into the checkpoint of `batch` that is being written; return its size and SHA-256.

        Args:
            batch: of the checkpoint.
            name: of the file.
            snapshot: of which the frozen parameters are.

        Raises:
            OSError: it cannot be written.
            CheckpointError: parameters that the snapshot shares with the stage were changed before they were written.
        """
        path = disk.partial_folder(disk.checkpoint_folder(self._run, batch)) / name
        if self._written and self._sums is None:
            self._sums = _sums_of(disk.checkpoint_folder(self._run, self._batch) / name)
        if snapshot.frozen != self._sums or not self._link(path):
            tensors = snapshot.on_cpu(sorted(snapshot.frozen))
            self._written, self._sums = disk.write_tensors(path, tensors), None
            if snapshot.shared and tensor_sums(tensors) != snapshot.frozen:
                raise CheckpointError("frozen parameters were changed while they were being written")
        self._sums, self._batch = snapshot.frozen, batch
        return self._written

    def _link(self, path: Path) -> bool:
        """Link to the file of the last checkpoint; return False if there is none, or it is another one by now."""
        place = disk.checkpoint_folder(self._run, self._batch)
        for source in (disk.partial_folder(place), place):  # in this order, as it may be renamed just now
            try:
                path.unlink(missing_ok=True)
                os.link(source / path.name, path, follow_symlinks=False)
                with open_regular(path) as file:
                    return bool(os.fstat(file.fileno()).st_size == self._written["bytes"])
            except OSError:  # the checkpoint was dropped or damaged, or the file system has no links
                continue
        return False


def _sums_of(path: Path) -> dict[str, int]:
    """Return the sums of the tensors in a file; none if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tensor_sums({name: file.get_tensor(name)})[name] for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}
