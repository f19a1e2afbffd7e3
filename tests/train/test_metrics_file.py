"""The metrics of a run: every record on a line of its own, and what they say of how far the run is."""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.train.metrics_file import Metrics
from penstock.train.setup.recorded_progress import recorded


def test_a_record_that_was_cut_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    """A process that dies, or a disk that is full in the middle of a line; the next record begins on a new one."""
    metrics = Metrics(tmp_path)
    metrics.add(batch=0, loss=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"batch": 1, "lo')
    metrics.add(resumed=1)
    Metrics(tmp_path).add(batch=1, loss=0.5)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[1] == '{"batch": 1, "lo'
    assert [json.loads(line) for line in (lines[0], *lines[2:])] == [
        {"batch": 0, "loss": 1.0}, {"resumed": 1}, {"batch": 1, "loss": 0.5},
    ]  # fmt: skip


def test_records_say_how_far_a_run_is_whatever_else_stands_there(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    assert recorded(tmp_path).batches == 0
    metrics.add(batch=4, loss=1.0)
    metrics.add(checkpoint=5)
    start = recorded(tmp_path).size
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"batch": \xff\n[1]\n{"batch": "9"}\n' + b"[" * 100_000 + b'\n{"checkpoint": true}\n')
    metrics.add(batch=6, loss=None)
    metrics.add(checkpoint=7, failure="No space left on device")
    found = recorded(tmp_path)
    assert (found.batches, found.saved, found.failures, found.failure) == (7, 5, 1, "No space left on device")
    later = recorded(tmp_path, start)
    assert (later.batches, later.saved, later.failures) == (7, 0, 1)
    assert later.size == (tmp_path / "metrics.jsonl").stat().st_size


def test_metrics_are_neither_written_nor_read_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "outside")
    Metrics(tmp_path).add(batch=0)
    assert (tmp_path / "outside").read_text() == "mine"
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    Metrics(tmp_path).add(batch=0)
    assert recorded(tmp_path).batches == 0
