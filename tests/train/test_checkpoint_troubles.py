"""What goes wrong in a run that continues is told at once, and again at the end."""

from __future__ import annotations

import resource
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import yaml
from rich.console import Console
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from penstock.checkpoint.format import checkpoint_folder, checkpoints
from penstock.errors import CheckpointError
from penstock.train import loop, reporter
from penstock.train.checkpoint_troubles import Troubles
from penstock.train.config.load import validate_config
from penstock.train.graceful_stop import DrainRequest
from penstock.train.prepare.prepare_run import prepare
from penstock.view.progress import TerminalObserver
from support.pool import Pool
from support.simulated import simulated


def test_everything_is_told_once_and_what_was_not_written_is_counted_at_the_end() -> None:
    store = HashStore()
    writing, reporting = Troubles(store), Troubles(store)
    assert (writing.summary(), reporting.news()) == ([], [])
    writing.passed_over("stage-0 is damaged")
    writing.checkpoint(2, None)
    writing.checkpoint(4, "No space left")
    assert reporting.news() == [
        "a damaged checkpoint was passed over: stage-0 is damaged",
        "the checkpoint after 4 batches was not written: No space left",
    ]
    writing.checkpoint(6, "the disk is gone")
    assert reporting.news() == ["the checkpoint after 6 batches was not written: the disk is gone"]
    assert (reporting.news(), reporting.summary()) == ([], [])
    assert writing.summary() == [
        "2 of 3 checkpoints were not written; the last of them, after 6 batches: the disk is gone"
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_shows_what_went_wrong_in_the_last_lines(terminal: bool, tmp_path: Path) -> None:
    console = Console(file=StringIO(), force_terminal=terminal, width=60, color_system=None)
    observer = TerminalObserver(console)
    observer.warned("the checkpoint after 4 batches was not written: [Errno 28] No space left on device")
    said = "warning: the checkpoint after 4 batches was not written: [Errno 28] No space left on device\n"
    assert console.file.getvalue() == said  # type: ignore[attr-defined]
    observer.interrupted(tmp_path, 7, simulated("1f1b", 2, 2, 1), ["1 of 3 checkpoints was not written"])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    at = lines.index("warning: 1 of 3 checkpoints was not written")
    assert any("stopped early" in line for line in lines[at:])


class Recording:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *told: self.events.append((name, told[0] if told else None))


def test_they_are_shown_even_if_the_weights_cannot_be_written_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines of a run are not reached then, and a short run has ended before its figures are posted."""
    monkeypatch.setattr(loop, "save_weights", mock.Mock(side_effect=CheckpointError("no room")))
    run = mock.Mock()
    with pytest.raises(CheckpointError, match="no room"):
        loop._Loop._finish(run, 1.0)
    assert [name for name, *_ in run.method_calls] == [
        "_save", "reporter.write_timeline", "_validate", "reporter.warn",
    ]  # fmt: skip


def train_on_a_small_disk(group: dist.ProcessGroup, values: dict[str, Any], folder: str, most: int) -> list[Any]:
    """Train as one rank where no file may be larger than `most`; returns the warnings, and the batch before each."""
    observer, before = Recording(), resource.getrlimit(resource.RLIMIT_FSIZE)
    reporter._POST_EVERY = 0.0
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        run = prepare(validate_config(values))
        store = PrefixStore(str(values["batches"]), _get_default_store())  # of this start
        loop._Loop(run, Path(folder), store, observer, DrainRequest(None), group).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told: list[Any] = []
    for name, value in observer.events:
        if name == "progress":
            told.append(value.batch)
        elif name == "warned":
            told.append(value)
        elif name == "finished":
            told.append(list(value.troubles))
    return told


@pytest.mark.processes
def test_checkpoints_that_find_no_room_are_told_while_the_run_goes_on(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    values: dict[str, Any] = {
        "method": "2bw", "stages": 2, "width": 2, "batches": 30, "microbatches": 2, "sample_length": 0,
        "validation_samples": 4,
        "model": {"layers": 2, "width": 32, "heads": 2, "context": 8}, "data": str(tmp_path / "text.txt"),
        "checkpoint": {"every": 4},
    }  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    quiet, told, *_ = pool.submit(train_on_a_small_disk, values, str(folder), 200_000, ranks=4)
    assert quiet == []
    warnings = [line for line in told if isinstance(line, str)]
    assert warnings
    assert all("was not written: stage-" in line and "File too large" in line for line in warnings)
    assert told.index(warnings[0]) < told.index(20)  # long before the end
    assert told[-1][0].startswith("8 of 8 checkpoints were not written; the last of them, after 30 batches: stage-")
    assert checkpoints(folder) == []
    pool.submit(train_on_a_small_disk, values | {"batches": 32}, str(folder), 10**9, ranks=4)
    damaged = checkpoint_folder(folder, 32) / "stage-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    _, told, *_ = pool.submit(train_on_a_small_disk, values | {"batches": 33}, str(folder), 10**9, ranks=4)
    (warning,) = [line for line in told if isinstance(line, str)]
    assert "a damaged checkpoint was passed over" in warning
    assert told[-1] == []  # it is told once
