"""Writing checkpoints: full and slow disks, several ranks, what a dead run has left."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

from penstock.checkpoint import format as disk
from penstock.checkpoint.format import checkpoint_folder, checkpoints, clear_parts, open_newest
from penstock.checkpoint.rank_announcements import LocalPosts, StorePosts
from penstock.checkpoint.writer import Part, Writer
from penstock.train.metrics_file import Metrics
from support.written_checkpoints import Told, snapshot, write, writer


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
    gate, real = threading.Event(), disk.write_tensors

    def write_slowly(path: Path, *more: Any) -> Any:
        if path.name == f"stage-{slow}.safetensors":
            gate.wait(30)
        return real(path, *more)

    monkeypatch.setattr(disk, "write_tensors", write_slowly)
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
