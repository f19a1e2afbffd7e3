"""The file of a stage's frozen parameters, which the checkpoints of a run share while these stay the same.

Every checkpoint has the file in its own folder, as a hard link, so each is whole by itself, and the content goes with
the last of them. Whether parameters have stayed the same is asked of their bytes: a user, or a block, may set them in
ways that leave no other trace.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint import format as disk
from penstock.files import open_regular


class FrozenFile:
    """Writes the file of one stage's frozen parameters, or links to the one of an earlier checkpoint.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._digest = b""
        self._batch = -1  # of the last checkpoint that has the file
        self._written: dict[str, Any] = {}

    def put(self, batch: int, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Put the file into the checkpoint of `batch` that is being written; return its size and SHA-256.

        Args:
            batch: of the checkpoint.
            name: of the file.
            tensors: on the CPU and contiguous.

        Raises:
            OSError: it cannot be written.
        """
        path, digest = disk.part_of(disk.place_of(self._run, batch)) / name, _digest(tensors)
        if digest != self._digest or not self._link(path):
            self._written = disk.write_tensors(path, tensors)
        self._digest, self._batch = digest, batch
        return self._written

    def _link(self, path: Path) -> bool:
        """Link to the file of the last checkpoint; return False if there is none, or it is another one by now."""
        place = disk.place_of(self._run, self._batch)
        for source in (disk.part_of(place), place):  # in this order, as it may be renamed just now
            try:
                path.unlink(missing_ok=True)
                os.link(source / path.name, path, follow_symlinks=False)
                with open_regular(path) as file:
                    return bool(os.fstat(file.fileno()).st_size == self._written["bytes"])
            except OSError:  # the checkpoint was dropped or damaged, or the file system has no links
                continue
        return False


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 of tensors, with their names, types and shapes."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
