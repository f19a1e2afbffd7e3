"""Two jobs and one folder: whoever takes something from the folder of a run has its lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.checkpoint.folder_claim import Owner, reading
from penstock.errors import CheckpointError
from support.command_line import run

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


@pytest.mark.parametrize(
    "arguments",
    ["train --resume run", "train --resume run --restart", "sample run", "predicted run --profile profile.yaml"],
)
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


def test_readers_share_a_folder_and_keep_a_run_away(folder: Path) -> None:
    with reading(folder):  # nobody has claimed it
        Owner(folder).claim()
    with reading(folder), reading(folder), pytest.raises(CheckpointError, match="another process reads from"):
        Owner(folder).claim()
    Owner(folder).claim()
