"""How far a run is, before it goes on: no process is needed to say so."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from penstock.checkpoint.format import part_of as being_written, place_of, write_index
from penstock.cli import main
from penstock.errors import ConfigError, InterruptedRunError, WorkerError
from penstock.train.config.load import load_config
from penstock.train.setup.prepare import check_resume


def leave(run: Path, batch: int) -> None:
    """A checkpoint without tensors."""
    place = place_of(run, batch)
    being_written(place).mkdir(parents=True)
    write_index(place, {"facts": {"batch": batch}, "extra": {}, "files": {}, "tensors": {}})


def test_fewer_batches_than_a_run_has_are_refused(tmp_path: Path) -> None:
    leave(tmp_path, 100)
    leave(tmp_path, 112)
    with pytest.raises(ConfigError, match="has 112 batches already; set batches above that, got 111"):
        check_resume(load_config(None, ["batches=111"]), tmp_path)
    check_resume(load_config(None, ["batches=112"]), tmp_path)  # its end, where that has failed
    check_resume(load_config(None, ["batches=113"]), tmp_path)
    (place_of(tmp_path, 112) / "index.json").write_text("{")  # the run goes on from the one before
    check_resume(load_config(None, ["batches=111"]), tmp_path)
    with pytest.raises(ConfigError, match="has 100 batches already"):
        check_resume(load_config(None, ["batches=20"]), tmp_path)


def test_what_has_no_checkpoint_or_no_whole_one_is_told_by_the_run(tmp_path: Path) -> None:
    check_resume(load_config(None, ["batches=1"]), tmp_path)
    leave(tmp_path, 5)
    (place_of(tmp_path, 5) / "index.json").unlink()
    check_resume(load_config(None, ["batches=1"]), tmp_path)


@pytest.mark.parametrize("of_a_job", [False, True])
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "there is no folder 'nowhere' to resume a run from; a run names its folder when it ends"),
        ("text.txt", "'text.txt' is a file; give the folder of the run that is to be resumed"),
        ("empty", "'empty' is not the folder of a run of penstock train: it has no config.yaml"),
        ("runs", "it has no config.yaml; the newest run in it is 'runs/2026-02-01-120000-2bw-2x4'"),
    ],
)
def test_what_is_no_run_is_not_resumed(monkeypatch, capsys, tmp_path, folder, message, of_a_job) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.cli.train.is_worker", lambda _: of_a_job)
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    for run in ("2026-01-01-120000-1f1b-2x4", "2026-02-01-120000-2bw-2x4"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").touch()
    monkeypatch.setattr(sys, "argv", ["penstock", "train", "--resume", folder])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert " ".join(printed.err.split()).endswith(message)


@pytest.mark.parametrize("of_a_job", [False, True])
def test_the_command_refuses_before_it_starts_workers(monkeypatch, capsys, tmp_path, of_a_job) -> None:
    """Neither as the one who starts them nor as one of torchrun's."""
    leave(tmp_path, 112)
    (tmp_path / "config.yaml").write_text("batches: 112\n")
    started = []
    monkeypatch.setattr("penstock.launch.launch.launch_local", lambda *_, **__: started.append("workers"))
    monkeypatch.setattr("penstock.cli.train.is_worker", lambda _: of_a_job)
    monkeypatch.setattr("penstock.cli.train._work", lambda *_: started.append("work"))
    command = ["penstock", "train", "--resume", str(tmp_path), "--set"]
    monkeypatch.setattr(sys, "argv", [*command, "batches=20"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "has 112 batches already; set batches above that, got 20" in " ".join(capsys.readouterr().err.split())
    assert started == []
    monkeypatch.setattr(sys, "argv", [*command, "batches=120"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert (caught.value.code, started) == (0, ["work" if of_a_job else "workers"])


@pytest.mark.parametrize(
    ("failure", "code"), [(InterruptedRunError(signal.SIGINT), 130), (WorkerError("worker 1 failed", ""), 1)]
)
def test_a_run_that_ends_before_its_time_says_how_to_go_on(monkeypatch, capsys, tmp_path, failure, code) -> None:
    """Where it has a checkpoint; in a terminal below the live display, whose last line has no end."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 500)

    def launch(*_, **__):
        raise failure

    monkeypatch.setattr("penstock.launch.launch.launch_local", launch)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    for batch, said in ((None, "there is no checkpoint in .* yet"), (3, "after 3 batches: penstock train --resume .*")):
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        if batch is not None:
            leave(run, batch)
        (run / "config.yaml").write_text(f"data: {tmp_path / 'text.txt'}\n")
        monkeypatch.setattr(sys, "argv", ["penstock", "train", "--resume", str(run)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == code
        printed = capsys.readouterr()
        assert printed.out.startswith("\n")
        assert re.search(said, " ".join(printed.err.split()))
