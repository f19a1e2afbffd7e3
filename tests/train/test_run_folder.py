"""The folder of a run says what has trained which batches."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from torch.distributed.distributed_c10d import _get_default_store

from penstock.errors import ConfigError
from penstock.train.config.load import load_config, validate_config
from penstock.train.config.written_config import note_changes
from penstock.train.graceful_stop import DrainRequest
from penstock.train.loop import _Loop
from penstock.train.prepare.prepare_run import prepare
from penstock.train.setup.run_folder import check_own_files
from support.pool import Pool
from support.worker_functions import Silent


def begun(folder: Path, *changes: str) -> Path:
    """A run folder with its configuration."""
    (folder / "config.yaml").write_text(yaml.safe_dump(load_config(None, list(changes)).model_dump()))
    return folder / "config.yaml"


def test_the_configuration_is_that_of_the_batches_to_come_and_says_what_was_before(tmp_path: Path) -> None:
    path = begun(tmp_path, "method=2bw", "batches=3")
    later = load_config(path, ["method=1f1b", "batches=6", "optimizer.lr=0.5", "options={}"])
    assert note_changes(later, tmp_path, 3) == {
        "method": {"before": "2bw", "now": "1f1b"},
        "batches": {"before": 3, "now": 6},
        "optimizer.lr": {"before": 0.003, "now": 0.5},
    }
    assert load_config(path, []) == later
    last = load_config(path, ["method=pipemare", "correction={decay: null}", 'prompt="a\\nb"', "lr_schedule.warm_up=0"])
    last = last.model_copy(update={"prompt": "a\nb"})
    note_changes(last, tmp_path, 5)
    assert load_config(path, []) == last
    lines = path.read_text().splitlines()
    assert lines[:2] == [
        "# From batch 3 on: method=1f1b (before: 2bw), batches=6 (before: 3), optimizer.lr=0.5 (before: 0.003)",
        '# From batch 5 on: method=pipemare (before: 1f1b), correction={"decay": null} (before: {}), '
        'prompt="a\\nb" (before: def ), lr_schedule.warm_up=0 (before: 50)',
    ]
    assert lines[2] == "method: pipemare"


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "unreadable"])
def test_a_lock_that_nobody_can_take_is_told_before_anything_starts(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path)
    check_own_files(tmp_path)
    lock = tmp_path / ".checkpoints.lock"
    if what == "folder":
        lock.mkdir()
    elif what == "pipe":
        os.mkfifo(lock)
    elif what == "link":
        lock.symlink_to(tmp_path / "config.yaml")
    else:  # root may read everything
        lock.touch(mode=0)
        opened = os.open
        monkeypatch.setattr(
            os, "open", lambda path, flags, *mode: _refuse(path) if path == lock else opened(path, flags, *mode)
        )
    with pytest.raises(ConfigError, match=rf"cannot resume in .*checkpoints\.lock: .*({what}|Permission denied)"):
        check_own_files(tmp_path)


def _refuse(path: Path) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_nothing_is_written_where_nothing_changes(tmp_path: Path) -> None:
    path = begun(tmp_path, "method=1f1b")
    path.write_text("# mine\n" + path.read_text() + "# too\n")
    before = path.read_bytes()
    assert note_changes(load_config(path, []), tmp_path, 3) == {}
    assert path.read_bytes() == before


def test_before_the_first_batch_there_is_no_before(tmp_path: Path) -> None:
    path = begun(tmp_path, "method=1f1b")
    assert note_changes(load_config(path, ["method=gpipe"]), tmp_path, 0)
    assert path.read_text().startswith("method: gpipe\n")


@pytest.mark.parametrize("text", [None, "metod: 2bw\n"])
def test_a_configuration_that_cannot_be_read_is_replaced(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    config = load_config(None, ["method=gpipe"])
    assert note_changes(config, tmp_path, 3) == {}
    assert load_config(tmp_path / "config.yaml", []) == config


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write .*config.yaml"):
        note_changes(load_config(None, []), tmp_path / "nowhere", 3)


def train(group: dist.ProcessGroup, values: dict[str, Any], folder: str) -> None:
    """One rank of a run."""
    _Loop(
        prepare(validate_config(values)), Path(folder), _get_default_store(), Silent(), DrainRequest(None), group
    ).run()


@pytest.mark.processes
def test_a_run_that_goes_on_by_another_method_says_so(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    values: dict[str, Any] = {
        "method": "gpipe", "width": 2, "batches": 2, "microbatches": 2, "sample_length": 0, "validation_samples": 4,
        "model": {"layers": 2, "width": 8, "heads": 2, "context": 8}, "data": str(tmp_path / "text.txt"),
    }  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    begun(folder).write_text(yaml.safe_dump(values))
    pool.submit(train, values, str(folder), ranks=4)
    assert (folder / "config.yaml").read_text() == yaml.safe_dump(values)
    now = values | {"method": "1f1b", "batches": 3}
    pool.submit(train, now, str(folder), ranks=4)
    found = load_config(folder / "config.yaml", [])
    assert found == validate_config(now)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (resumed,) = [line for line in lines if "resumed" in line]
    assert resumed == {"resumed": 2, "method": "1f1b"}
    (changed,) = [line for line in lines if "changed" in line]
    assert changed["values"]["method"] == {"before": "gpipe", "now": "1f1b"}
    at = lines.index(changed)
    assert [line["batch"] for line in lines[:at] if "batch" in line] == [0, 1]
    assert [line["batch"] for line in lines[at:] if "batch" in line] == [2]
