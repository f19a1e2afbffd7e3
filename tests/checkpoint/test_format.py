"""Checkpoints on disk are complete or not there at all, and whatever happens to one is noticed."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

from penstock.checkpoint import format as disk, index as indexes
from penstock.checkpoint.announcements import LocalPosts, Posts, StorePosts
from penstock.checkpoint.format import Checkpoint, checkpoint_folder, checkpoints, clear_parts, open_newest
from penstock.checkpoint.writer import Part, Writer
from penstock.errors import CheckpointError
from penstock.runtime.rank.snapshot import Snapshot
from penstock.train.metrics_file import Metrics
from penstock.train.setup.early_stopping import Patience, known_after


def snapshot(batch: int, index: int = 0, pipeline: int = 0, **tensors: torch.Tensor) -> Snapshot:
    kind = f"fixed.{pipeline}" if pipeline else "weights"
    named = {f"{kind}/{index}.{name}": tensor for name, tensor in tensors.items()}
    values = {f"optimizer/mu/{index}.w": 0.5 + index} if not pipeline else {}
    return Snapshot(batch, pipeline, index, named, values, {"batch": batch, "updates": batch - 1})


class Told:
    def __init__(self) -> None:
        self.found: list[tuple[int, str | None]] = []

    def __call__(self, batch: int, failure: str | None) -> None:
        self.found.append((batch, failure))


def writer(run: Path, own: list[Part], posts: Posts, told: Told, keep: int = 2, timeout: float = 20.0) -> Writer:
    parts = [(0, 0), (1, 0), (0, 1), (1, 1)]
    return Writer(run, parts, own, keep, lambda batch: {"samples": 8 * batch}, posts, timeout, timeout / 4, told)


def write(run: Path, batch: int, keep: int = 2) -> None:
    """A checkpoint of two stages, of which pipeline 1 has only buffers of stage 1."""
    told, posts = Told(), LocalPosts()
    one = writer(run, [(0, 0), (1, 0), (0, 1), (1, 1)], posts, told, keep)
    one.sink(snapshot(batch, 0, w=torch.arange(6.0).reshape(2, 3), half=torch.ones(3, dtype=torch.bfloat16)))
    one.sink(snapshot(batch, 1, w=torch.full((4,), float(batch))))
    one.sink(snapshot(batch, 0, 1))
    one.sink(snapshot(batch, 1, 1, buffer=torch.tensor([7])))
    assert one.finish(batch) is None
    assert told.found == [(batch, None)]


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


@pytest.mark.parametrize("where", ["file", "index"])
def test_a_full_disk_costs_the_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    write(tmp_path, 4)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((disk, "save_file") if where == "file" else (disk, "complete")), full)
        told = Told()
        one = writer(tmp_path, [(0, 0), (1, 0), (0, 1), (1, 1)], LocalPosts(), told)
        for index, pipeline in ((0, 0), (1, 0), (0, 1), (1, 1)):
            one.sink(snapshot(8, index, pipeline, w=torch.ones(2)))
        failure = one.finish(8)
        assert failure is not None
    assert "No space left on device" in failure
    assert told.found == [(8, failure)]
    newest, faults = open_newest(tmp_path)
    assert newest is not None
    assert (newest.batch, faults) == (4, [])
    assert not list((tmp_path / "checkpoints").glob(".*"))
    write(tmp_path, 12)
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000004", "batch-00000012"]


def test_a_full_disk_for_real(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk without room."""
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    told = Told()
    one = Writer(tmp_path, [(0, 0)], [(0, 0)], 2, lambda _: {}, LocalPosts(), 5.0, 1.0, told)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        one.sink(snapshot(4, w=torch.ones(5000)))
        failure = one.finish(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        assert failure is not None
    assert "File too large" in failure
    assert checkpoints(tmp_path) == []


def test_ranks_write_their_own_and_the_first_completes(tmp_path: Path) -> None:
    told, posts = [Told() for _ in range(4)], LocalPosts()
    parts: list[Part] = [(0, 0), (1, 0), (0, 1), (1, 1)]
    writers = [writer(tmp_path, [part], posts, t) for part, t in zip(parts, told, strict=True)]
    for (index, pipeline), one in zip(parts[:3], writers[:3], strict=True):
        one.sink(snapshot(6, index, pipeline, w=torch.ones(1) * index))
    time.sleep(0.2)
    assert checkpoints(tmp_path) == []  # one is missing
    writers[3].sink(snapshot(6, 1, 1))
    assert [one.finish(6) for one in writers] == [None] * 4
    assert [t.found for t in told] == [[(6, None)], [], [], []]
    assert checkpoints(tmp_path) == [checkpoint_folder(tmp_path, 6)]


def test_a_rank_that_never_writes_costs_the_checkpoint(tmp_path: Path) -> None:
    told = Told()
    one = writer(tmp_path, [(0, 0)], LocalPosts(), told, timeout=1.0)
    one.sink(snapshot(6, w=torch.ones(1)))
    assert one.finish(6) == "a stage was not written within 1 seconds"
    assert checkpoints(tmp_path) == []


def test_a_snapshot_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So there are never copies of more than one."""
    gate, real = threading.Event(), disk.save_file

    def slow(*arguments: Any, **options: Any) -> None:
        gate.wait(10)
        real(*arguments, **options)

    monkeypatch.setattr(disk, "save_file", slow)
    one = Writer(tmp_path, [(0, 0)], [(0, 0)], 2, lambda _: {}, LocalPosts(), 5.0, 4.0, Told())
    first, second = snapshot(1, w=torch.ones(2)), snapshot(2, w=torch.ones(2))
    one.sink(first)
    assert first.tensors
    threading.Timer(0.2, gate.set).start()
    one.sink(second)
    assert not first.tensors
    assert one.finish(2) is None
    assert len(checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("slow", [0, 1])
def test_one_is_left_out_when_a_disk_is_slower_than_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """On all ranks, whichever has the slow disk; training waits for a part of the time-out only, and goes on."""
    gate, real = threading.Event(), disk.save_file

    def write_slowly(tensors: Any, path: Path, **options: Any) -> None:
        if path.name == f"stage-{slow}.safetensors":
            gate.wait(30)
        real(tensors, path, **options)

    monkeypatch.setattr(disk, "save_file", write_slowly)
    told, posts, parts = Told(), LocalPosts(), [(0, 0), (1, 0)]
    ranks = [Writer(tmp_path, parts, [part], 3, lambda _: {}, posts, 8.0, 2.0, told) for part in parts]
    first = [snapshot(1, index, w=torch.ones(2)) for index in (0, 1)]
    for one, taken in zip(ranks, first, strict=True):
        one.sink(taken)
    if slow == 0:
        assert ranks[1].make_room(2)
        ranks[1].sink(snapshot(2, 1, w=torch.ones(2)))
    begun = time.monotonic()
    assert not ranks[slow].make_room(2)
    assert time.monotonic() - begun < 8.0
    late = snapshot(2, slow, w=torch.ones(2))
    ranks[slow].sink(late)
    assert late.tensors  # nobody has touched it
    gate.set()
    if slow == 1:
        ranks[0].sink(snapshot(2, 0, w=torch.ones(2)))
    failures = [one.finish(2) for one in ranks]
    assert failures == ["a disk is too slow: the previous checkpoint was still being written"] * 2
    for index, one in enumerate(ranks):
        assert one.make_room(3)
        one.sink(snapshot(3, index, w=torch.ones(2)))
    assert [one.finish(3) for one in ranks] == [None, None]
    assert told.found == [(1, None), (2, failures[0]), (3, None)]
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000001", "batch-00000003"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_what_a_dead_run_was_writing_is_cleared(tmp_path: Path) -> None:
    write(tmp_path, 4)
    part = disk.partial_folder(checkpoint_folder(tmp_path, 8))
    part.mkdir()
    (part / "stage-0.safetensors").write_bytes(b"half")
    assert [path.name for path in checkpoints(tmp_path)] == ["batch-00000004"]
    clear_parts(tmp_path)
    assert not part.exists()
    assert checkpoint_folder(tmp_path, 4).exists()


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


def test_stages_of_one_process_may_be_a_batch_apart(tmp_path: Path) -> None:
    told = Told()
    one = Writer(tmp_path, [(0, 0), (1, 0)], [(0, 0), (1, 0)], 2, lambda _: {}, LocalPosts(), 2.0, 1.0, told)
    for batch, index in ((5, 1), (6, 1), (5, 0), (6, 0)):
        one.sink(snapshot(batch, index, w=torch.ones(2)))
    assert one.finish(6) is None
    assert told.found == [(5, None), (6, None)]


def test_a_full_disk_costs_lines_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # what cannot be written into
    Metrics(tmp_path).add(batch=1)


def test_patience_counts_a_version_once() -> None:
    """A run that goes on from a checkpoint finds again what it had found before it died."""
    patience = Patience(2)
    for version, loss in [(2, 1.0), (4, 2.0), (4, 2.0), (2, 1.0), (6, 0.5), (8, None)]:
        patience.record(version, loss)
        assert patience.end == math.inf
    for _ in range(2):
        patience.record(10, 0.6)
        assert patience.end == 16
    patience.record(12, 0.1)  # found while the run was ending
    assert patience.end == 16
    endless = Patience(None)
    endless.record(2, math.nan)
    assert endless.end == math.inf


def test_patience_leaves_time_for_what_is_under_way() -> None:
    """With one microbatch per batch, on 8 stages 7 batches are under way."""
    patience = Patience(1, known_after(8, 1))
    patience.record(2, None)
    assert patience.end == 2 + 6 + 7


@pytest.mark.parametrize("kind", ["local", "hash", "file"])
def test_announcements_are_removed_once_they_are_read(kind: str, tmp_path: Path) -> None:
    """Of every checkpoint but the last one's verdict: the store does not grow with their number."""
    store = {"hash": HashStore, "file": lambda: FileStore(str(tmp_path / "store"), 1)}.get(kind, lambda: None)()
    posts, told = LocalPosts() if store is None else StorePosts(store, "one"), Told()
    parts = [(0, 0), (1, 0), (0, 1), (1, 1)]
    one, left = writer(tmp_path, parts, posts, told), []
    for batch in range(1, 7):
        for index, pipeline in parts:
            one.sink(snapshot(batch, index, pipeline, w=torch.zeros(1)))
        assert one.finish(batch) is None
        left.append(len(posts._texts) if store is None else store.num_keys())
    assert len(set(left)) == 1
    assert len(one._rooms) <= 2
