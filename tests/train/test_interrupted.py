"""A run that is told to end saves what it has done, and goes on from there as if nothing had been."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from campaigns.faults.job import workers_of
from penstock.checkpoint.format import checkpoints
from penstock.train.export.weights_folder import load_weights
from support.command_line import only_folder, settings

pytestmark = pytest.mark.processes


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def to_the_group(launcher, number):
    """What a terminal does, and `timeout`."""
    os.killpg(launcher, number)


def to_all(launcher, number):
    """What systemd does, and Slurm."""
    for process in [*psutil.Process(launcher).children(recursive=True), psutil.Process(launcher)]:
        process.send_signal(number)


def kill_the_launcher(launcher, number):
    os.kill(launcher, number)


def kill_the_server(launcher, number):
    """What workers are forked from."""
    os.kill(psutil.Process(workers_of(launcher)[0]).ppid(), number)


def hostile_folder(out):
    """A working folder whose files would run if anything looked there for the modules of these names."""
    folder = out.with_name(f"{out.name}-cwd")
    folder.mkdir()
    for name in ("penstock", "random", "signal", "socket", "torch", "yaml"):
        (folder / f"{name}.py").write_text("open(__file__ + '-has-run', 'w')\nraise ImportError('planted')\n")
    return folder


def interrupt(out, text, *changes, send, number, after=3, terminal=None):
    """Start a run, send a signal when it has trained for a while; returns what it printed, and its exit code.

    It is started in a hostile folder, and must leave no temporary files of its own.
    """
    command = [Path(sys.executable).with_name("penstock"), "train", "--data", text, *settings(f"out={out}", *changes)]
    pipes = {"stdout": subprocess.PIPE if terminal is None else terminal, "stderr": subprocess.PIPE, "text": True}
    folder, temporary = hostile_folder(out), Path(tempfile.mkdtemp())  # short, so that workers are forked
    where = {"cwd": folder, "env": {**os.environ, "TMPDIR": str(temporary)}}
    with subprocess.Popen(command, **pipes, **where, start_new_session=True) as process:
        while sum(len(path.read_text().splitlines()) for path in out.glob("*/metrics.jsonl")) < after:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        workers = workers_of(process.pid)
        send(process.pid, number)
        printed, err = process.communicate(timeout=60)
    assert len(workers) == 2
    assert not list(folder.glob("*-has-run"))
    if number != signal.SIGKILL:
        assert {path.name.split("_")[0] for path in temporary.iterdir()} <= {"torchinductor"}  # torch's
        assert not list(out.glob("*/.workers*"))
    shutil.rmtree(temporary)
    patience = time.monotonic() + 10
    while any(map(psutil.pid_exists, workers)):
        assert time.monotonic() < patience
        time.sleep(0.1)
    return printed, err, process.returncode


def lines_of(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


SHORT = ["batches=300", "sample_length=0", "checkpoint.every=25", "evaluate.every=15", "ema_decay=0.9"]


@pytest.mark.parametrize(
    ("send", "number"), [pytest.param(to_the_group, signal.SIGINT, marks=pytest.mark.long), (to_all, signal.SIGTERM)]
)
def test_it_goes_on_bit_for_bit(tmp_path, text, send, number, command):
    printed, err, code = interrupt(tmp_path / "runs", text, *SHORT, send=send, number=number)
    folder = only_folder(tmp_path / "runs")
    assert code == 0, err
    assert "Traceback" not in err
    assert f"penstock train --resume {folder}" in printed
    (interrupted,) = [line["interrupted"] for line in lines_of(folder, "interrupted")]
    assert 1 <= interrupted < 300
    assert checkpoints(folder)[-1].name == f"batch-{interrupted:08d}"
    assert not (folder / "weights").exists()
    if number == signal.SIGTERM:
        return
    resumed = command("train", "--resume", folder)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from the checkpoint after {interrupted} batches" in resumed.stdout
    assert sorted(line["batch"] for line in lines_of(folder, "batch")) == list(range(300))
    assert len(checkpoints(folder)) == 2
    whole = command("train", "--data", text, *settings(f"out={tmp_path / 'whole'}", *SHORT))
    assert whole.returncode == 0, whole.stderr
    other = only_folder(tmp_path / "whole")
    for place in ("", "averaged"):
        found, wanted = load_weights(folder / place), load_weights(other / place)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for key in ("update", "evaluated", "validation_loss"):
        found, wanted = ([(line[key], line.get("loss")) for line in lines_of(f, key)] for f in (folder, other))
        assert found == wanted


@pytest.mark.long
def test_a_closed_terminal_ends_it_with_a_checkpoint(tmp_path, text):
    """Nothing can be printed any more, not by workers either; terminals and shells send the signal several times."""
    master, terminal = os.openpty()
    out = tmp_path / "runs"

    def hang_up(launcher, number):
        os.close(master)
        os.close(terminal)
        for _ in range(2):
            os.kill(launcher, number)
            time.sleep(0.3)

    changes = ["batches=1000000", "sample_length=0", "checkpoint.every=1000000"]
    _, err, code = interrupt(out, text, *changes, send=hang_up, number=signal.SIGHUP, terminal=terminal)
    assert code == 0, err
    (interrupted,) = [line["interrupted"] for line in lines_of(only_folder(out), "interrupted")]
    assert [path.name for path in checkpoints(only_folder(out))] == [f"batch-{interrupted:08d}"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("send", "wanted"), [pytest.param(kill_the_launcher, -9, marks=pytest.mark.long), (kill_the_server, 1)]
)
def test_nobody_is_left_when_one_that_looks_after_workers_is_killed(tmp_path, text, send, wanted):
    changes = ["batches=1000000", "sample_length=0"]
    _, err, code = interrupt(tmp_path / "runs", text, *changes, send=send, number=signal.SIGKILL)
    assert code == wanted
    if wanted == 1:
        assert "error: worker" in err
        assert "Traceback" not in err


@pytest.mark.long
def test_a_second_signal_ends_it_at_once(tmp_path, text):
    """Here no batch ever ends again, because a worker has been stopped."""
    command = [sys.executable, "-m", "penstock", "train", "--data", str(text)]
    command += settings(f"out={tmp_path / 'runs'}", "batches=1000000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob("runs/*/metrics.jsonl")):
            assert process.poll() is None
            time.sleep(0.1)
        workers = workers_of(process.pid)
        psutil.Process(workers[0]).suspend()
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)
    assert process.returncode == 130
    assert "SIGINT has ended the run at once" in " ".join(err.split())
    assert "Traceback" not in err
    assert not any(map(psutil.pid_exists, workers))


@pytest.mark.smoke
def test_a_run_ends_when_nothing_gets_better(tmp_path, text, command):
    """A rate that is much too high; all ranks end after the same batch, with a checkpoint of it."""
    changes = settings(
        f"out={tmp_path / 'runs'}", "batches=100000", "sample_length=0", "optimizer.lr=30", "lr_schedule.warm_up=0",
        "evaluate.every=2", "evaluate.samples=4", "evaluate.patience=3", "checkpoint.every=100000",
    )  # fmt: skip
    ran = command("train", "--data", text, *changes)
    assert ran.returncode == 0, ran.stderr
    folder = only_folder(tmp_path / "runs")
    losses = [line["loss"] for line in lines_of(folder, "evaluated")]
    best = min(range(len(losses)), key=losses.__getitem__)
    decisive = lines_of(folder, "evaluated")[best + 3]["evaluated"]
    assert lines_of(folder, "batch")[-1]["batch"] + 1 == decisive + 7  # what is under way is finished
    assert lines_of(folder, "validation_loss")
    (saved,) = lines_of(folder, "checkpoint")
    assert saved["checkpoint"] == lines_of(folder, "batch")[-1]["batch"] + 1
    assert len(checkpoints(folder)) == 1
