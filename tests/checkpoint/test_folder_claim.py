"""Two jobs and one folder: whoever takes something from the folder of a run has its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.checkpoint import format as disk
from penstock.checkpoint.folder_claim import Owner, reading
from penstock.checkpoint.index import write_index
from penstock.errors import CheckpointError
from penstock.train.config.load import validate_config
from penstock.train.loop import train
from support.command_line import run
from support.worker_functions import Silent

PROFILE = "profile --cluster h100 --layers 2 --hidden 8 --sequence 8 --vocabulary 8 --out profile.yaml"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a run, which waits for nobody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.checkpoint.folder_claim._PATIENCE", 0.0)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("batches: 5\n")
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    return tmp_path / "run"


@pytest.mark.parametrize("arguments", ["train --resume run", "train --resume run --restart", "sample run"])
def test_nothing_is_taken_from_a_run_under_way(monkeypatch, capsys, folder: Path, arguments: str) -> None:
    assert run(monkeypatch, capsys, *PROFILE.split())[0] == 0
    owner = Owner(folder)
    owner.claim()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, _, err = run(monkeypatch, capsys, *arguments.split())
    assert code == 2
    assert err.startswith("error: a run is under way in 'run': process ")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    del owner
    monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *_, **__: None)
    assert "under way" not in run(monkeypatch, capsys, *arguments.split())[2]


def test_a_worker_that_begins_a_run_again_takes_nothing_from_one_under_way(folder: Path) -> None:
    """Under torchrun nobody has looked before it."""
    (folder.parent / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    config = validate_config({
        "method": "sequential", "stages": 1, "microbatches": 1, "batches": 1, "sample_length": 0,
        "validation_samples": 2, "data": str(folder.parent / "text.txt"), "threads": torch.get_num_threads(),
        "model": {"layers": 1, "width": 8, "heads": 2, "context": 8}, "microbatch_size": 1,
    })  # fmt: skip
    owner = Owner(folder)
    owner.claim()
    before = sorted(folder.rglob("*"))
    try:
        with pytest.raises(CheckpointError, match="another Checkpoints of this process writes to .*run'"):
            train(config, folder, Silent(), restart=True)
    finally:
        dist.destroy_process_group()  # which stays after an error, for peers
    assert sorted(folder.rglob("*")) == before


def test_whoever_takes_nothing_reads_from_a_run_under_way(monkeypatch, capsys, folder: Path) -> None:
    assert run(monkeypatch, capsys, *PROFILE.split())[0] == 0
    owner = Owner(folder)
    owner.claim()
    assert "the profile is of another model" in run(monkeypatch, capsys, "profile", "profile.yaml", "--check", "run")[2]
    del owner


def make() -> penstock.Pipeline:
    torch.manual_seed(1)
    return penstock.Pipeline(
        [nn.Linear(3, 3), nn.Linear(3, 3)], "1f1b", stages=2, microbatches=2, loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )  # fmt: skip


BATCHES = [(torch.ones(4, 3), torch.zeros(4, 3))] * 4


def test_a_second_owner_does_not_strip_a_checkpoint_that_is_being_completed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It comes between the index and the name of the checkpoint, and loads that."""
    first, second = make(), make()
    list(first.run(BATCHES[:2]))
    loads = threading.Thread(target=lambda: penstock.Checkpoints(second, tmp_path).load())

    def amid(place: Path, content: Mapping[str, Any]) -> None:
        write_index(disk.partial_folder(place), disk.SCHEMA, content)
        loads.start()
        loads.join(0.3)
        complete(place, content)

    complete = disk.complete
    monkeypatch.setattr(disk, "complete", amid)
    penstock.Checkpoints(first, tmp_path).save()
    loads.join()
    assert second.batches == 2


def test_what_is_gone_finishes_what_it_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before another one writes the same checkpoint in the same folder."""
    pipeline, complete = make(), disk.complete
    monkeypatch.setattr(disk, "complete", lambda *given: (time.sleep(0.3), complete(*given)))
    list(pipeline.run(BATCHES, save=penstock.Checkpoints(pipeline, tmp_path).every(4)))
    penstock.Checkpoints(pipeline, tmp_path).save()
    loaded = penstock.Checkpoints(make(), tmp_path).load()
    assert loaded is not None
    assert loaded.batch == 4


def test_readers_share_a_folder_and_keep_a_run_away(folder: Path) -> None:
    with reading(folder):  # nobody has claimed it
        Owner(folder).claim()
    with reading(folder), reading(folder), pytest.raises(CheckpointError, match="another process reads from"):
        Owner(folder).claim()
    Owner(folder).claim()
