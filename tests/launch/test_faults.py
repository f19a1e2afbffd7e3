"""Faults of every kind: the short form of the campaign (`make faults`), and what it would see."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from campaigns.faults.cases import Case, Moment, draw
from campaigns.faults.job import workers_of
from campaigns.faults.judge import Outcome, Wanted, judge_end, judge_same, reports
from campaigns.faults.kinds import KINDS, kind_named
from campaigns.faults.shapes import BATCHES, Shape
from campaigns.faults.trial import Trials
from penstock.errors import WorkerError
from penstock.launch.launch import launch_local
from penstock.train.config.load import validate_config
from penstock.train.data.window_sampler import batches
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import prepare
from support.worker_functions import stop_after_the_end, stop_at_the_end

pytestmark = pytest.mark.processes

SHAPE = Shape("2bw", 2)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Compares with a run of one process, which has the same weights, bit for bit."""
    made = Trials(tmp_path_factory.mktemp("faults"))
    prepared = prepare(validate_config({**SHAPE.settings(), "data": str(made.text)}))
    pipeline = make_pipeline(prepared)
    count, size = prepared.microbatches, prepared.config.microbatch_size
    reports = list(pipeline.run(batches(prepared.windows, 0, BATCHES, count, size)))
    losses = {report.batch: report.loss for report in reports if report.loss is not None}
    made.undisturbed[SHAPE] = Wanted(pipeline.state_dict(), losses)
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rank", "moment"),
    [
        ("worker: SIGSEGV", 1, Moment("steady", 60, 0.0)),
        ("disk: the folder of checkpoints is blocked", 0, Moment("steady", 20, 0.0)),
    ],
)
def test_a_fault_changes_no_bit(trials: Trials, name: str, rank: int, moment: Moment) -> None:
    """The short form of `make faults`; restarts, damaged checkpoints, torchruns, full disks have tests of their own."""
    found = trials.carry_out(Case(0, kind_named(name), SHAPE, rank, moment), name)
    assert found["wrong"] == []
    assert found["in_time"]


@pytest.mark.long
def test_a_worker_that_stalls_is_named_and_its_peers_say_what_they_waited_for(trials: Trials) -> None:
    case = Case(0, kind_named("worker: SIGSTOP"), SHAPE, 1, Moment("steady", 20, 0.0))
    outcome = trials.run(case, "stalls", {"batches": 100_000, "timeout": 5.0})
    assert judge_end(case, outcome) == []
    assert "error: worker 1 is stalled or dead: it reported nothing" in outcome.err
    assert "lane from rank 1 to rank 0" in outcome.err or "the control lane of all stages" in outcome.err
    assert outcome.seconds is not None
    assert outcome.seconds < 40  # elastic would wait for half a minute after the time-out


def test_every_kind_of_fault_is_drawn_at_every_depth_and_width() -> None:
    """In 220 cases; a case depends on its number and the seed alone."""
    cases = [draw(number, seed=0) for number in range(220)]
    assert {case.kind for case in cases} == set(KINDS)
    assert len({kind.name for kind in KINDS}) == len(KINDS) > 100
    assert {case.shape.stages for case in cases} == {2, 3, 4}
    assert {case.shape.width for case in cases} == {1, 2}
    assert {case.moment.when for case in cases} == {"start", "steady", "saving", "ending"}
    assert all(case.rank < case.shape.workers for case in cases)
    assert sum(case.shape.workers > 4 for case in cases) < 20
    assert [draw(number, seed=0) for number in range(0, 220, 7)] == cases[::7]
    assert str(draw(3, seed=0)) != str(draw(3, seed=1))


def test_the_campaign_sees_what_is_wrong(trials: Trials, tmp_path: Path) -> None:
    case = Case(0, kind_named("worker: SIGKILL"), SHAPE, 1, Moment("steady", 20, 0.0))
    report = "error: worker 1 failed with exit code -9: Signal 9 (SIGKILL) received by PID 5\n  worker 0: "
    was_at = "TransportError: rank 0, stage 0, F14: the gradient lane from rank 1 to rank 0 broke: reset"
    good = Outcome(tmp_path, [1], 1.0, True, 20, err=report + was_at)
    assert judge_end(case, good) == []
    for changes, wrong in (
        ({"codes": [0]}, "exit codes [0], not (1,)"),
        ({"codes": [None]}, "it hangs"),
        ({"seconds": 100.0}, "it took 100.0 s to end, not 60"),
        ({"left": ["process 7 (sleeping)"]}, "left behind: process 7"),
        ({"left": ["temporary pymp-x"]}, "left behind: temporary pymp-x"),
        ({"err": good.err.replace("worker 1", "worker 0")}, "it does not say"),
        ({"err": report + "Error: something"}, "worker 0 has not reported"),
        ({"err": good.err + "\nTraceback"}, "it prints a traceback"),
    ):
        assert any(said.startswith(wrong) for said in judge_end(case, replace(good, **changes))), wrong
    alone = trials.undisturbed[SHAPE]
    noise = kind_named("resource tracker: SIGKILL").end.noise
    lines = '  File "/x/resource_tracker.py", line 239, in main\n    cache[rtype].remove(name)\n'
    tracker = f"Traceback (most recent call last):\n{lines}KeyError: '/mp-_8wiq0xu'\n"
    with mock.patch.object(Wanted, "of", return_value=alone):
        for err, allowed, wrong in (
            (2 * tracker, noise, 0), (tracker, "", 1), (tracker.replace("resource_tracker", "launch"), noise, 1)
        ):  # fmt: skip
            assert len(judge_same(alone, Outcome(tmp_path, [0], err=err), (0,), noise=allowed)) == wrong
    first, *_ = alone.weights
    ended = Outcome(tmp_path, [0])
    for end, wrong in (
        (alone, []),
        (Wanted(alone.weights | {first: alone.weights[first] + 1}, alone.losses), ["1 of 15 tensors differ"]),
        (Wanted(alone.weights | {"x": torch.ones(1)}, alone.losses), ["0 of 15 tensors differ"]),
        (Wanted(alone.weights, alone.losses | {3: 0.5}), ["the losses of batches [3] differ"]),
    ):
        with mock.patch.object(Wanted, "of", return_value=end):
            found = judge_same(alone, ended, (0,))
        assert [said[: len(start)] for said, start in zip(found, wrong, strict=True)] == wrong


@pytest.mark.smoke
def test_a_worker_that_stalls_when_others_have_done_their_part() -> None:
    begun = time.monotonic()
    message = "worker 1 is stalled or dead: it reported nothing\n  worker 0: had finished"
    with pytest.raises(WorkerError, match=message):
        launch_local(2, stop_at_the_end, timeout=1.0)
    assert time.monotonic() - begun < 60  # it would be for ever


@pytest.mark.long
def test_a_worker_that_is_stopped_while_it_waits_for_the_launcher() -> None:
    """Elastic wakes it, and waits until it has woken, which never happens."""
    begun = time.monotonic()
    message = "worker 1 is stalled or dead: it had finished, but did not exit\n  worker 0: had finished"
    with pytest.raises(WorkerError, match=message):
        launch_local(2, stop_after_the_end, timeout=3.0)
    assert time.monotonic() - begun < 60


@pytest.mark.long
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


def test_stash_is_not_drawn_where_a_drain_would_change_what_it_reads() -> None:
    """Workers of an agent that is killed go on, and drain when the other agent ends its own."""
    cases = [draw(number, seed=0) for number in range(440)]
    assert any(case.shape.method == "stash" for case in cases)
    killed = [case for case in cases if case.kind.name == "hosts: agent SIGKILL"]
    assert killed
    assert not [case for case in killed if case.shape.method == "stash"]


def test_what_a_survivor_says_of_a_call_of_all_ranks_counts() -> None:
    why = "a peer is dead or stalled, or has not made this call, which all ranks make together (Timed out)"
    assert reports(f"TransportError: rank 1, sharing the CPUs: {why}", silence=False)
    assert not reports("TransportError: something broke", silence=False)
    lane = "the activation lane from rank 1 to rank 2 broke"
    for action in ("F2", "Fe2"):  # a forward of training and one of an evaluation
        assert reports(f"TransportError: rank 2, stage 2, {action}: {lane}", silence=False)


def test_records_do_not_tell_where_this_machine_has_what(tmp_path: Path) -> None:
    said = f'File "{sys.prefix}/lib/a.py", {sys.base_prefix}/lib/b.py, {tmp_path}, ' + "x" * 300
    for err in (said, f"error: {said}"):
        tail = Outcome(tmp_path, err=err).tail
        assert "ENVIRONMENT/lib/a.py" in tail
        assert "PYTHON/lib/b.py" in tail
        assert not any(place in tail for place in (sys.prefix, sys.base_prefix, str(tmp_path)))
