"""Under torchrun the same command joins the job of each machine; here the machines are torchruns of their own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from penstock.checkpoint.format import Checkpoint, checkpoints
from penstock.cli.failures import is_first_to_say
from penstock.train.export.weights_folder import load_weights
from support.command_line import Command, only_folder, settings, start

pytestmark = pytest.mark.processes
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return str(path)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test, however it ends."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else ():
            child.kill()
        process.kill()
        process.wait()


def lines(out: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in out.glob("*/metrics.jsonl"))


def wait_for_lines(out: Path, count: int, processes: list[subprocess.Popen[str]]) -> None:
    wait_until(lambda: lines(out) >= count, processes)


def wait_until(it_is_so: Callable[[], bool], processes: list[subprocess.Popen[str]]) -> None:
    patience = time.monotonic() + 120
    while not it_is_so():
        assert time.monotonic() < patience
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        time.sleep(0.02)


def worker_of(torchrun: subprocess.Popen[str]) -> psutil.Process:
    (worker,) = psutil.Process(torchrun.pid).children()
    return worker


def two_machines(out: Path, text: str, *changes: str, restarts: int = 3) -> list[subprocess.Popen[str]]:
    """Two torchruns that meet; the first one need not be the one that serves the store."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "pair"]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(restarts), *rendezvous]
    command += ["-m", "penstock", "train", "--data", text, *settings(f"out={out}", *changes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(2)]


@pytest.mark.long
def test_one_machine_that_is_told_to_end_ends_both(
    tmp_path: Path, text: str, started: list[subprocess.Popen[str]]
) -> None:
    """Torchrun hands the signal on to its own workers; elastic on the other one would wait for five minutes."""
    out = tmp_path / "runs"
    started += two_machines(out, text, "batches=100000", "checkpoint.every=100000", "sample_length=0")
    wait_for_lines(out, 5, started)
    started[0].send_signal(signal.SIGTERM)
    begun, printed = time.monotonic(), ""
    for process in started:
        said, err = process.communicate(timeout=90)
        assert "Received 15 death signal" in err or "SignalException" in err
        printed += said
    assert time.monotonic() - begun < 30  # the grace that schedulers give
    assert "stopped early; a checkpoint holds all" in printed
    assert len(checkpoints(only_folder(out))) == 1


@pytest.mark.long
def test_when_the_torchrun_of_a_machine_is_killed_both_end(
    tmp_path: Path, text: str, started: list[subprocess.Popen[str]]
) -> None:
    """Its worker goes on without it, and elastic on the other machine would wait for five minutes in the end.

    They save what they have done, unless that torchrun has served the store of the job.
    """
    out = tmp_path / "runs"
    started += two_machines(out, text, "batches=100000", "checkpoint.every=20", "sample_length=0", restarts=0)
    wait_for_lines(out, 50, started)
    wait_until(lambda: bool(checkpoints(only_folder(out))), started)
    workers = [worker_of(torchrun) for torchrun in started]
    started[0].kill()
    begun = time.monotonic()
    said = "".join(part for torchrun in started for part in torchrun.communicate(timeout=90))
    assert time.monotonic() - begun < 45  # torchrun gives workers 30 seconds to end
    assert not psutil.wait_procs(workers, timeout=5)[1]
    saved = re.search(r"a checkpoint holds all (\d+) batches done", said)
    newest = Checkpoint(checkpoints(only_folder(out))[-1]).batch
    if saved is None:
        assert re.search(
            r"error: rank [01]: the store of the job, which a torchrun at localhost serves, does not answer", said
        )
        assert newest >= 20
    else:
        assert newest == int(saved[1])


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is one of two workers of a torchrun."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in {**job, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    yield
    del store


@pytest.mark.usefixtures("as_worker")
def test_only_the_first_worker_prints_an_error(command: Command) -> None:
    ran = [command("train", "--set", "metod=1f1b") for _ in range(2)]
    assert [each.returncode for each in ran] == [2, 2]
    assert "error: unknown configuration key 'metod'; did you mean 'method'?" in ran[0].stderr
    assert ran[1].stderr == ""


@pytest.mark.long
def test_an_error_of_every_worker_is_said_once() -> None:
    """Not by every one of them, and without a trace of what is within."""
    rest = ["--standalone", "--nproc-per-node", "2", "-m", "penstock", "train"]
    wrong = start("-m", "torch.distributed.run", *rest, "--set", "metod=1f1b")
    assert wrong.stderr.count("error: unknown configuration key 'metod'; did you mean 'method'?") == 1
    assert wrong.returncode == 1  # of torchrun
    assert 'File "' not in wrong.stderr.partition("elastic/multiprocessing/api.py")[0]


def test_the_first_worker_that_asks_is_the_one_that_says_it(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of every message, and again after a restart; what cannot be asked is said."""
    assert is_first_to_say("no job")
    assert is_first_to_say("no job")
    request.getfixturevalue("as_worker")
    assert [is_first_to_say(message) for message in ("a", "a", "b", "a", "b")] == [True, False, True, False, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [is_first_to_say("a"), is_first_to_say("a")] == [True, False]
    monkeypatch.setenv("MASTER_PORT", "1")
    begun = time.monotonic()
    assert is_first_to_say("a")
    assert time.monotonic() - begun < 4  # a worker whose torchrun has died with the store says so, and ends, at once


@pytest.mark.long
def test_two_machines_start_again_when_a_worker_of_one_is_killed(
    tmp_path: Path,
    text: str,
    started: list[subprocess.Popen[str]],
    command: Command,
) -> None:
    """Each counts its own failures; the result is that of a run to which nothing happened, bit for bit."""
    out, changes = tmp_path / "runs", ["batches=100", "checkpoint.every=10", "sample_length=0", "validation_samples=4"]
    started += two_machines(out, text, *changes)
    wait_for_lines(out, 40, started)
    worker_of(started[0]).kill()
    for process in started:
        _, err = process.communicate(timeout=150)
        assert process.returncode == 0, err
    ours = command("train", *settings(f"out={tmp_path / 'undisturbed'}", *changes), "--data", text)
    assert ours.returncode == 0, ours.stderr
    weights, wanted = load_weights(only_folder(out)), load_weights(only_folder(tmp_path / "undisturbed"))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
