"""The file of a stage's frozen parameters, which the checkpoints of a run share while these stay the same.

Every checkpoint has the file in its own folder, as a hard link, so each is whole by itself, and the content goes with
the last of them. Whether parameters have stayed the same is asked of their bytes: a user, or a block, may set them in
ways that leave no other trace.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint import format as disk
from penstock.files import open_regular

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
        self._digest = b""  # not known of a file that this object has not written
        self._batch = batch  # of the last checkpoint that has the file
        self._written = dict(written)

    def put(self, batch: int, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Put the file into the checkpoint of `batch` that is being written; return its size and SHA-256.

        Args:
            batch: of the checkpoint.
            name: of the file.
            tensors: on the CPU and contiguous.

        Raises:
            OSError: it cannot be written.
        """
        path, digest = disk.part_of(disk.place_of(self._run, batch)) / name, _digest(tensors.items())
        if self._written and not self._digest:
            self._digest = _digest_of(disk.place_of(self._run, self._batch) / name)
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


def _digest_of(path: Path) -> bytes:
    """Return the digest of the tensors in a file; an empty one if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return _digest((name, file.get_tensor(name)) for name in sorted(file.keys()))
    except (OSError, SafetensorError):
        return b""


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Return the SHA-256 of tensors, with their names, types and shapes, in the order of the names."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
