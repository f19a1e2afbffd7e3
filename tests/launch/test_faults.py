"""Workers that are killed or stopped: the cheapest cases of the campaign (`make faults`)."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from campaigns.trial import Fault, Shape, judge_failure, judge_folder, run, workers_of
from penstock.errors import WorkerError
from penstock.launch.launch import launch_local
from penstock.train.config.load import validate_config
from penstock.train.data.windows import batches
from penstock.train.export.weights_format import load_weights
from penstock.train.setup.build_pipeline import make_pipeline
from penstock.train.setup.prepare import prepare
from support.worker_functions import stop_after_the_end, stop_at_the_end

pytestmark = pytest.mark.processes

SHAPE = Shape("2bw", 2)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return path


def test_a_worker_that_is_killed_and_started_again_changes_no_bit(tmp_path: Path, text: Path) -> None:
    settings = {**SHAPE.settings(), "data": str(text), "batches": 30}
    outcome = run(tmp_path / "run", {**settings, "restarts": 1}, (Fault(0, signal.SIGKILL, 30, 0.0),))
    assert outcome.code == 0, outcome.err
    assert outcome.faults == 1
    assert "worker 0: reported nothing" in outcome.err  # before all were started again
    assert not outcome.alive
    assert judge_folder(outcome.folder) == []
    prepared = prepare(validate_config(settings))
    pipeline = make_pipeline(prepared)  # all in this process, which is the same, bit for bit
    count, size = prepared.microbatches, prepared.config.microbatch_size
    assert len(list(pipeline.run(batches(prepared.windows, 0, 30, count, size)))) == 30
    found, wanted = load_weights(outcome.folder), pipeline.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_worker_that_stalls_is_named_and_its_peers_say_what_they_waited_for(tmp_path: Path, text: Path) -> None:
    settings = {**SHAPE.settings(), "data": str(text), "batches": 100_000, "timeout": 5.0}
    fault = Fault(1, signal.SIGSTOP, 20, 0.0)
    outcome = run(tmp_path / "run", settings, (fault,))
    assert judge_failure(SHAPE, fault, outcome) == []
    assert "error: worker 1 is stalled or dead: it reported nothing" in outcome.err
    assert "lane from rank 1 to rank 0" in outcome.err or "the control lane of all stages" in outcome.err
    assert outcome.seconds is not None
    assert outcome.seconds < 40  # elastic would wait for half a minute after the time-out


@pytest.mark.smoke
def test_a_worker_that_stalls_when_others_have_done_their_part() -> None:
    begun = time.monotonic()
    message = "worker 1 is stalled or dead: it reported nothing\n  worker 0: had finished"
    with pytest.raises(WorkerError, match=message):
        launch_local(2, stop_at_the_end, timeout=1.0)
    assert time.monotonic() - begun < 60  # it would be for ever


def test_a_worker_that_is_stopped_while_it_waits_for_the_launcher() -> None:
    """Elastic wakes it, and waits until it has woken, which never happens."""
    begun = time.monotonic()
    message = "worker 1 is stalled or dead: it had finished, but did not exit\n  worker 0: had finished"
    with pytest.raises(WorkerError, match=message):
        launch_local(2, stop_after_the_end, timeout=3.0)
    assert time.monotonic() - begun < 60


def test_workers_that_wait_for_nothing_do_not_outlive_the_launcher() -> None:
    start = "launch_local(2, wait_for_nothing)"
    code = f"from support.worker_functions import *; from penstock.launch.launch import launch_local; {start}"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1]) as launcher:
        until(lambda: len(workers_of(launcher.pid)) == 2, 60.0)
        workers = workers_of(launcher.pid)
        time.sleep(1.0)
        launcher.kill()
    until(lambda: not any(map(psutil.pid_exists, workers)), 10.0)


def until(true: Callable[[], bool], seconds: float) -> None:
    patience = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < patience
        time.sleep(0.1)
