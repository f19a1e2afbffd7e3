"""Checkpoints on disk are complete or not there at all, and whatever happens to one is noticed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint import format as disk, index as indexes
from penstock.checkpoint.format import Checkpoint, checkpoint_folder, checkpoints, open_newest
from penstock.checkpoint.rank_announcements import LocalPosts
from penstock.checkpoint.writer import Writer
from penstock.errors import CheckpointError
from penstock.train.export.weights_folder import save_index, save_stage
from support.written_checkpoints import Told, snapshot, write


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    write(tmp_path, 5)
    found = Checkpoint(checkpoint_folder(tmp_path, 5))
    assert found.batch == 5
    assert found.facts["updates"] == 4
    assert found.facts["values"] == {"optimizer/mu/0.w": 0.5, "optimizer/mu/1.w": 1.5}
    assert found.extra == {"samples": 40}
    assert set(found.names) == {"weights/0.w", "weights/0.half", "weights/1.w", "fixed.1/1.buffer"}
    assert torch.equal(found.tensor("weights/0.w"), torch.arange(6.0).reshape(2, 3))
    assert found.tensor("weights/0.half").dtype == torch.bfloat16
    assert sorted(os.listdir(found.folder)) == [
        "index.json", "stage-0.safetensors", "stage-1.1.safetensors", "stage-1.safetensors"
    ]  # fmt: skip
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_files_are_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    """safetensors renames a temporary file, which only its owner can read; a group that shares runs needs all files."""
    before = os.umask(0o027)
    try:
        write(tmp_path, 5)
        save_index(tmp_path, [save_stage(tmp_path, 5, 0, 1, {"0.w": torch.zeros(3)})], {}, text=True)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"stage-0.safetensors", "index.json", "batch-5-stage-0-of-1.safetensors"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_older_ones_go(tmp_path: Path) -> None:
    for batch in (3, 20, 100):
        write(tmp_path, batch)
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000020", "batch-00000100"]


def test_one_of_the_same_batch_is_replaced(tmp_path: Path) -> None:
    """A restart may go further back than the newest one, if that is damaged."""
    write(tmp_path, 5)
    (checkpoint_folder(tmp_path, 5) / "stage-1.safetensors").write_bytes(b"damaged")
    write(tmp_path, 5)
    assert Checkpoint(checkpoint_folder(tmp_path, 5)).batch == 5


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


FAULTS = [
    ("stage-0.safetensors", truncated, r"stage-0\.safetensors' is damaged: it has \d+ of \d+ bytes"),
    ("stage-1.safetensors", flipped, r"stage-1\.safetensors' is damaged: it has other content"),
    ("stage-1.1.safetensors", Path.unlink, r"cannot read .*stage-1\.1\.safetensors': No such file"),
    ("index.json", truncated, r"index\.json' is damaged"),
    ("index.json", lambda path: path.write_text('{"schema": 99}'), "has schema 99, this version of penstock reads 1"),
    ("index.json", lambda path: path.write_text('{"schema": 1, "facts": {}}'), "is damaged: its content does not"),
]


@pytest.mark.parametrize(("name", "damage", "message"), FAULTS)
def test_the_one_before_a_damaged_one_is_taken(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    write(tmp_path, 4)
    write(tmp_path, 8)
    damage(checkpoint_folder(tmp_path, 8) / name)
    newest, faults = open_newest(tmp_path)
    assert newest is not None
    assert newest.batch == 4
    assert [str(checkpoint_folder(tmp_path, 8)) in str(fault) for fault in faults] == [True]
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(checkpoint_folder(tmp_path, 8))
    damage(checkpoint_folder(tmp_path, 4) / name)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        open_newest(tmp_path)


def rewritten(place: Path, **changes: Any) -> None:
    """Give the index of a checkpoint other entries, with a digest that fits them."""
    index = json.loads((place / "index.json").read_text())
    content = {key: value for key, value in index.items() if key not in ("schema", "sha256")}
    indexes.write_index(place, 1, content | changes)


FILE = {"bytes": 1, "sha256": "0" * 64}
OTHER_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"facts": []}, "facts is a list, not a dict"),
    ({"facts": {}}, "does not say of how many batches it is"),
    ({"facts": {"batch": "8"}}, "does not say of how many batches it is"),
    ({"facts": {"batch": 10**30}}, "does not say of how many batches it is"),
    ({"facts": {"batch": True}}, "does not say of how many batches it is"),
    ({"facts": {"batch": 8, "values": [1]}}, "does not say of how many batches it is"),
    ({"extra": None}, "extra is a NoneType, not a dict"),
    ({"files": "stage-0.safetensors"}, "files is a str"),
    ({"files": {"stage-0.safetensors": 3}}, "does not say how large 'stage-0.safetensors' is"),
    ({"files": {"stage-0.safetensors": FILE | {"bytes": -1}}}, "does not say how large"),
    ({"files": {"stage-0.safetensors": FILE | {"sha256": 7}}}, "does not say how large"),
    ({"files": {"index.json": FILE}}, "names 'index.json', which is not a file of its folder"),
    ({"files": {"..": FILE}}, r"names '\.\.', which is not a file of its folder"),
    ({"tensors": {"weights/0.w": {}}}, "names no file of tensor 'weights/0.w'"),
    ({"tensors": []}, "tensors is a list"),
]


@pytest.mark.parametrize(("changes", "message"), OTHER_TYPES)
def test_entries_of_another_type_behind_a_valid_digest(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, 8)
    rewritten(checkpoint_folder(tmp_path, 8), **changes)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(checkpoint_folder(tmp_path, 8))


def test_the_number_inside_counts_not_that_of_the_folder(tmp_path: Path) -> None:
    """A copy of batch 40 named 99 is older than batch 60: it is neither taken nor thrown away for being newer."""
    for batch in (40, 60):
        write(tmp_path, batch)
    shutil.copytree(checkpoint_folder(tmp_path, 40), checkpoint_folder(tmp_path, 99))
    newest, faults = open_newest(tmp_path)
    assert newest is not None
    assert (newest.batch, faults) == (60, [])
    assert [path.name[-2:] for path in checkpoints(tmp_path)] == ["40", "99", "60"]
    assert [path.name[-2:] for path in checkpoints(tmp_path, 50)] == ["40", "99"]
    disk.set_aside(tmp_path, newest.folder)
    assert len(checkpoints(tmp_path)) == 3
    disk.discard_after(tmp_path, 50)
    assert [path.name[-2:] for path in checkpoints(tmp_path)] == ["40", "99"]
    newest, faults = open_newest(tmp_path)
    assert newest is not None
    assert newest.batch == 40
    (checkpoint_folder(tmp_path, 99) / "index.json").write_text("{")
    newest, faults = open_newest(tmp_path)
    assert newest is not None
    assert (newest.folder, len(faults)) == (checkpoint_folder(tmp_path, 40), 1)


@pytest.mark.parametrize("what", ["link", "pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["stage-0.safetensors", "index.json"])
def test_what_is_no_regular_file_is_neither_read_nor_waited_for(tmp_path: Path, name: str, what: str) -> None:
    write(tmp_path, 4)
    path = checkpoint_folder(tmp_path, 4) / name
    path.rename(tmp_path / "elsewhere")
    if what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=rf"batch-00000004.*(symbolic link|{what})"):
        Checkpoint(checkpoint_folder(tmp_path, 4))


def test_checkpoints_are_not_written_through_links(tmp_path: Path) -> None:
    """Neither through that of all of them nor through what a dead run may have left."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for linked in (tmp_path / "one" / "checkpoints", disk.partial_folder(checkpoint_folder(tmp_path / "two", 4))):
        linked.parent.mkdir(parents=True)
        linked.symlink_to(outside)
        told = Told()
        one = Writer(linked.parents[len(linked.parts) - len(tmp_path.parts) - 2], [(0, 0)], [(0, 0)], 2, lambda _: {},
                     LocalPosts(), 5.0, 1.0, told)  # fmt: skip
        one.sink(snapshot(4, w=torch.ones(2)))
        failure = one.finish(4)
        assert failure is not None
        assert "symbolic link" in failure
        assert list(outside.iterdir()) == []
        with pytest.raises(CheckpointError, match="symbolic link"):
            disk.check_folder(tmp_path / linked.relative_to(tmp_path).parts[0])


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert open_newest(tmp_path) == (None, [])


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, 4)
    path = checkpoint_folder(tmp_path, 4) / "index.json"
    index = json.loads(path.read_text())
    index["files"] = {"../secret": index["files"].pop("stage-0.safetensors"), **index["files"]}
    index["tensors"] = {name: "../secret" if f == "stage-0.safetensors" else f for name, f in index["tensors"].items()}
    del index["schema"], index["sha256"]
    part = disk.partial_folder(checkpoint_folder(tmp_path, 4))
    part.mkdir()
    disk.complete(checkpoint_folder(tmp_path, 4), index)
    with pytest.raises(CheckpointError, match=r"names '\.\./secret', which is not a file of its folder"):
        Checkpoint(checkpoint_folder(tmp_path, 4))


def test_a_folder_without_an_index_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 4)
    (checkpoint_folder(tmp_path, 4) / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* is intact"):
        open_newest(tmp_path)


def test_one_digit_of_the_index_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 4)
    path = checkpoint_folder(tmp_path, 4) / "index.json"
    path.write_text(path.read_text().replace('"updates": 3', '"updates": 8'))
    with pytest.raises(CheckpointError, match=r"index\.json' is damaged: its content does not match its checksum"):
        open_newest(tmp_path)


def test_newer_ones_that_are_damaged_do_not_push_good_ones_out(tmp_path: Path) -> None:
    write(tmp_path, 4)
    write(tmp_path, 8)
    flipped(checkpoint_folder(tmp_path, 8) / "stage-0.safetensors")
    write(tmp_path, 6, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000006", "batch-00000008"]
    disk.set_aside(tmp_path, checkpoint_folder(tmp_path, 6))
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000006"]
    assert len(list((tmp_path / "checkpoints").glob(".damaged-*"))) == 1


def test_old_ones_that_cannot_be_removed_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(disk, "remove_older", refuse)
    for batch in (1, 2, 3):
        write(tmp_path, batch)
    assert len(checkpoints(tmp_path)) == 3
