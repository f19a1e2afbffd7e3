"""A process that is killed between any two steps of the disk leaves whole checkpoints only; the next one goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint import format as disk
from penstock.checkpoint.format import (
    Checkpoint,
    checkpoint_folder,
    checkpoints,
    clear_parts,
    open_newest,
    partial_folder,
)
from penstock.checkpoint.index import INDEX
from penstock.guarded_files import fingerprint


class Killed(BaseException):
    """Nothing after it happens."""


def write(run: Path, batch: int, data: str) -> None:
    """What ranks and the first of them do for a checkpoint, in one."""
    place = checkpoint_folder(run, batch)
    part = partial_folder(place)
    part.mkdir(parents=True, exist_ok=True)
    for stage in (0, 1):  # files without tensors
        (part / f"stage-{stage}.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + data.encode())
    files = {path.name: fingerprint(path) for path in part.iterdir() if path.name != INDEX}
    content = {"facts": {"batch": batch, "values": {}}, "extra": {}, "files": files, "tensors": {}}
    disk.complete(place, content)
    disk.remove_older(run, place, keep=1)


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> Callable[[], int]:
    """Let the process die at its n-th step; tells how many it has made."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps > after:
            raise Killed

    def stepping(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            step()
            return function(*arguments, **options)

        return wrapped

    def remove(folder: Path, ignore_errors: bool = False) -> None:
        for path in sorted(folder.iterdir(), reverse=True):  # the index last: the worst order
            step()
            path.unlink()
        step()
        folder.rmdir()

    monkeypatch.setattr(disk.os, "rename", stepping(os.rename))
    monkeypatch.setattr(disk.os, "fsync", stepping(os.fsync))
    monkeypatch.setattr(disk.os, "replace", stepping(os.replace))
    monkeypatch.setattr(disk.shutil, "rmtree", remove)
    return lambda: steps


@pytest.mark.parametrize("batch", [8, 4])  # a new one; one in the place of another, after a restart from before it
def test_only_whole_ones_are_found(tmp_path: Path, batch: int) -> None:
    after, over = 0, False
    while not over:
        run = tmp_path / f"run-{after}"
        write(run, 4, "four")
        with pytest.MonkeyPatch.context() as patch:
            steps = dying(patch, after)
            try:
                write(run, batch, "again")
                over = True
            except Killed:
                pass
        for place in checkpoints(run):
            Checkpoint(place)
        newest, faults = open_newest(run)
        assert faults == []
        assert newest is not None or batch == 4  # where one replaces another there is a moment without
        clear_parts(run)
        assert not list((run / disk.FOLDER).glob(".*"))
        write(run, 12, "later")
        assert [path.name for path in checkpoints(run)] == ["batch-00000012"]
        shutil.rmtree(run)
        after += 1
    assert steps() >= 7
