"""What the user is told when workers end, from what they left behind; what a worker says that is told to end."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from penstock.errors import ConfigError, EndedError, TransportError
from penstock.job.place import Agent, JobPlace
from penstock.launch import worker_exit as module
from penstock.launch.worker_exit import WorkerExits, work
from penstock.train import process_group
from penstock.train.config.schema import TrainConfig
from penstock.train.graceful_stop import DrainRequest

LOST = "TransportError: rank 0, stage 0, B3: the gradient lane from rank 1 to rank 0 broke: connection closed"
ENDED = "EndedError: rank 2, stage 2, F4, waiting for the activation lane from rank 1 to rank 2: ended by SIGTERM"


def leave(folder: Path, rank: int, message: str, start: int = 0, seconds: int = 10) -> None:
    place = folder / "errors" / "run" / f"attempt_{start}" / str(rank)
    place.mkdir(parents=True)
    extra = {"timestamp": str(seconds), "py_callstack": f"trace of {rank}"}
    (place / "error.json").write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def done(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, start: int = 0) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(module, "end_with_parent", lambda: None)  # not this process
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        work(lambda: None, str(folder))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def begin(folder: Path, rank: int, process: int, group: int, start: int = 0) -> None:
    (folder / f"begun-{start}-{rank}-{process}-{group}").touch()


def explained(folder: Path, rank: int, code: int, workers: int = 3) -> list[str]:
    """The report, where elastic has seen a worker end with a code."""
    failure = ProcessFailure(rank, 77, code, "there is none")
    return str(WorkerExits(folder, workers, 1.0).explain(ChildFailedError("train", {rank: failure}))).split("\n  ")


def test_a_worker_that_was_killed(tmp_path: Path) -> None:
    leave(tmp_path, 0, LOST)
    leave(tmp_path, 2, ENDED)
    assert explained(tmp_path, 1, -9) == [
        "worker 1 failed with exit code -9: Signal 9 (SIGKILL) received by PID 77",
        f"worker 0: {LOST}",
        f"worker 2: {ENDED}, because another worker has failed",
    ]


def test_a_worker_that_was_killed_though_elastic_saw_another_one_first(tmp_path: Path) -> None:
    """Or that is stalled, which looks the same."""
    leave(tmp_path, 0, LOST)
    leave(tmp_path, 2, ENDED)
    report = explained(tmp_path, 0, 1)
    assert report[0] == "worker 1 is stalled or dead: it reported nothing"
    assert report[1:] == [f"worker 0: {LOST}", f"worker 2: {ENDED}, because another worker has failed"]


def test_an_error_of_its_own_is_the_cause_whoever_is_seen_first(tmp_path: Path) -> None:
    leave(tmp_path, 0, LOST, seconds=9)
    leave(tmp_path, 1, "ValueError: planted", seconds=10)
    leave(tmp_path, 2, "RuntimeError: planted later", seconds=11)
    report = explained(tmp_path, 0, -6)
    assert report[0] == "worker 1 failed with exit code 1: ValueError: planted"
    assert report[1:] == [f"worker 0: {LOST}", "worker 2: RuntimeError: planted later"]


def test_a_signal_from_outside_the_job_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that it ended reports first, if in the same second; the others lose their connections to it."""
    leave(tmp_path, 2, ENDED)
    time.sleep(0.02)
    leave(tmp_path, 0, LOST)
    assert explained(tmp_path, 2, 1)[0] == "worker 1 is stalled or dead: it reported nothing"
    leave(tmp_path, 1, "EndedError: F7: ended by SIGTERM", seconds=11)
    assert explained(tmp_path, 0, 1) == [
        f"worker 2 failed: {ENDED}, which came from outside the job",
        f"worker 0: {LOST}",
        "worker 1: EndedError: F7: ended by SIGTERM, because another worker has failed",
    ]
    leave(tmp_path, 3, "ValueError: planted", seconds=11)
    assert explained(tmp_path, 2, 1, workers=4)[0] == "worker 3 failed with exit code 1: ValueError: planted"


def test_a_worker_that_dies_without_a_report_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the midst of the start, where nobody can report."""
    now, killed = 1000.0, []
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "_state", {3: "Z", os.getpid(): "S"}.__getitem__)
    monkeypatch.setattr(module.os, "kill", lambda process, number: killed.append((process, number)))
    monkeypatch.setattr(module.os, "getpgid", {3: 30, os.getpid(): 31}.__getitem__)
    one = WorkerExits(tmp_path, 2, 30.0)
    (tmp_path / "errors" / "run" / "attempt_0").mkdir(parents=True)
    begin(tmp_path, 0, os.getpid(), 31)
    begin(tmp_path, 1, 3, 30)
    one.look()
    assert not killed
    now += 10.1
    one.look()
    assert (os.getpid(), signal.SIGKILL) in killed


def test_some_have_said_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "errors" / "run" / "attempt_0").mkdir(parents=True)
    done(monkeypatch, tmp_path, 2)
    assert explained(tmp_path, 1, 17)[1:] == [
        "worker 0: reported nothing: it died, was still starting, or did not respond",
        "worker 2: had finished",
    ]
    leave(tmp_path, 1, LOST)
    assert explained(tmp_path, 1, 1)[0] == "worker 0 is stalled or dead: it reported nothing"
    assert explained(tmp_path, 1, 1, workers=4)[0] == "worker 0 or 3 is stalled or dead: they reported nothing"


def test_what_was_left_behind_by_an_earlier_start_is_told_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = WorkerExits(tmp_path, 3, 1.0)
    leave(tmp_path, 0, LOST, start=9)
    done(monkeypatch, tmp_path, 1, start=9)
    done(monkeypatch, tmp_path, 2, start=9)
    with caplog.at_level(logging.WARNING, "penstock"):
        one.look()
        assert not caplog.messages
        leave(tmp_path, 1, "ValueError: planted", start=10)
        one.look()
    told = f"\n  worker 0: {LOST}\n  worker 1: had finished\n  worker 2: had finished"
    assert caplog.messages == [f"a worker has failed; all workers are restarted{told}"]
    assert explained(tmp_path, 1, 1) == [
        "worker 1 failed with exit code 1: ValueError: planted",
        "worker 0: reported nothing: it died, was still starting, or did not respond",
        "worker 2: reported nothing: it died, was still starting, or did not respond",
    ]


def test_what_all_workers_say_is_told_once(tmp_path: Path) -> None:
    """Without a traceback, where the message says all."""
    for rank in (0, 1, 2):
        leave(tmp_path, rank, "DataError: other text")
    error = WorkerExits(tmp_path, 3, 1.0).explain(
        ChildFailedError("train", {1: ProcessFailure(1, 77, 1, "there is none")})
    )
    assert str(error) == "worker 0 failed with exit code 1: DataError: other text\n  all other workers: the same"
    assert error.trace == ""


def test_a_report_that_is_being_written_is_none_yet(tmp_path: Path) -> None:
    leave(tmp_path, 0, LOST)
    (tmp_path / "errors" / "run" / "attempt_0" / "0" / "error.json").write_text('{"mess')
    assert "worker 0: reported nothing" in explained(tmp_path, 1, -9)[1]


@pytest.mark.parametrize(("said", "patience"), [("failed", 10.0), ("done", 30.0), ("all done", 30.0)])
def test_who_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, patience: float
) -> None:
    """A while after the last report, or a time-out after others have done their part; strangers are not touched."""
    now, killed = 1000.0, []
    groups = {os.getpid(): os.getpgrp(), 3: 30}
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module.os, "getpgid", groups.__getitem__)
    monkeypatch.setattr(module.os, "kill", lambda process, number: killed.append((process, number)))
    one = WorkerExits(tmp_path, 2, 30.0)
    (tmp_path / "errors" / "run" / "attempt_0").mkdir(parents=True)
    begin(tmp_path, 1, 3, 30)
    one.look()
    now = 2000.0
    one.look()  # nobody has said anything: they may train for ever
    assert not killed
    if said == "failed":
        leave(tmp_path, 0, LOST)
        begin(tmp_path, 0, os.getpid(), os.getpgrp())
    for rank in {"failed": [], "done": [0], "all done": [0, 1]}[said]:
        done(monkeypatch, tmp_path, rank)
        if rank == 1:
            (tmp_path / "begun-0-1-3-30").unlink()
    one.look()
    now += patience
    one.look()
    assert not killed
    now += 0.1
    one.look()
    wanted = {"failed": {os.getpid(), 3}, "done": {3}, "all done": {os.getpid()}}[said]
    assert set(killed) == {(process, signal.SIGKILL) for process in wanted}
    killed.clear()
    groups[3] = groups[os.getpid()] = 31  # the numbers belong to others now
    one.kill()
    assert not killed
    assert explained(tmp_path, 1, -9, workers=2)[0] == (
        "worker 1 failed with exit code -9: Signal 9 (SIGKILL) received by PID 77"
    )
    failure = ProcessFailure(1, 77, -9, "there is none")
    assert str(one.explain(ChildFailedError("train", {1: failure}))).startswith("worker 1 is stalled or dead")


# --- the worker's side ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_a_signal_that_the_launcher_has_got_too_is_no_end(tmp_path: Path, late: float) -> None:
    """As when every process of the job is told to end; what comes later, or a second time, is meant for the worker."""
    file = tmp_path / "drain"
    request = DrainRequest(file)
    before = signal.getsignal(signal.SIGTERM)

    def told_twice() -> None:
        asks = threading.Timer(late, file.touch)
        asks.start()
        if not late:
            asks.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.asked
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(EndedError), request.handle_signals():
            told_twice()
        os.utime(file, (1, 1))
        with pytest.raises(EndedError), DrainRequest(file).handle_signals():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_that_is_ended_says_what_it_was_doing(tmp_path: Path) -> None:
    request = DrainRequest(tmp_path / "drain")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(EndedError, match="starting: ended by SIGTERM"), request.handle_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        request.doing = lambda: "F7"
        with pytest.raises(EndedError, match="F7: ended by SIGTERM"), request.handle_signals():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_worker_is_not_ended_in_the_midst_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries take any error there for a missing module, and go on without it or print a trace."""
    (tmp_path / "module_that_tries.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except Exception:\n"
        "    swallowed = True\n"
        "else:\n"
        "    swallowed = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request, before = DrainRequest(tmp_path / "drain"), signal.getsignal(signal.SIGTERM)

    def start() -> None:
        import module_that_tries  # type: ignore[import-not-found]

        assert not module_that_tries.swallowed
        time.sleep(10)

    try:
        with pytest.raises(EndedError, match="starting: ended by SIGTERM"), request.handle_signals():
            start()
    finally:
        signal.signal(signal.SIGTERM, before)


class _LostAgent:
    """An agent that has died."""

    is_gone = True

    def __init__(self, starts_again: bool) -> None:
        self.starts_again = starts_again


def test_workers_whose_torchrun_has_died_end_or_fail_where_others_are_started_again() -> None:
    assert DrainRequest(None, cast(Agent, _LostAgent(starts_again=False))).asked
    with pytest.raises(EndedError, match=r"^starting: the torchrun of this machine has died$"):
        DrainRequest(None, cast(Agent, _LostAgent(starts_again=True))).asked  # noqa: B018


def test_a_worker_that_fails_is_left_to_its_report(tmp_path: Path) -> None:
    """Its peers' failures make the launcher end it, perhaps while it writes."""
    request = DrainRequest(tmp_path / "drain")
    before = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        try:
            raise ValueError("F7: a block of the user's")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(ValueError, match="F7: a block of the user's"), request.handle_signals():
            fail()
        os.kill(os.getpid(), signal.SIGTERM)  # it is about to write
    finally:
        signal.signal(signal.SIGTERM, before)
    with request.handle_signals():
        pass
    assert signal.getsignal(signal.SIGTERM) is before  # one that has done its part may be ended


def environment(monkeypatch: pytest.MonkeyPatch, store: dist.Store, rank: int, size: int, start: int) -> None:
    place = JobPlace("torchrun", rank, size, "127.0.0.1", 0, served=True)
    monkeypatch.setattr(process_group, "job_place", lambda _: place)
    monkeypatch.setattr(process_group, "job_store", lambda *_: store)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))


def test_workers_that_are_started_again_do_not_see_what_those_before_have_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elastic keeps its store; old addresses, or old posts about a checkpoint, would be taken for new ones."""
    store = dist.HashStore()
    for start in (0, 1):
        environment(monkeypatch, store, 0, 1, start)
        with process_group.process_group(TrainConfig(stages=1)) as own:
            assert not own.check(["stage-0-is-written"])
            own.set("stage-0-is-written", "yes")
    assert store.num_keys() > 2


def test_ranks_that_do_not_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    config = TrainConfig(stages=3, timeout=0.1)
    monkeypatch.setattr(process_group, "_STARTING", 0.2)
    environment(monkeypatch, store, 1, 3, 0)
    message = "rank 1, joining the job: rank 0, 2 did not come within 0.2 seconds; it is stalled or dead"
    with pytest.raises(TransportError, match=message), process_group.process_group(config):
        pass


def test_another_number_of_processes_than_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a torchrun that starts too few."""
    environment(monkeypatch, dist.HashStore(), 0, 1, 0)
    message = "the job has 1 processes, but stages is 2; .* torchrun --no-python --nproc-per-node 2 penstock train"
    with pytest.raises(ConfigError, match=message), process_group.process_group(TrainConfig(stages=2)):
        pass


def test_machines_that_count_starts_differently_meet() -> None:
    """Elastic counts the failures of its own machine; what an earlier start has left must not be taken for this one's.

    Rank 1 comes long before rank 0 and finds the name and the configurations of the start before.
    """
    store, config = dist.HashStore(), TrainConfig(stages=2, timeout=20.0)
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            later = pool.submit(process_group._meet, config, store, 1, 2)
            time.sleep(0.3)
            assert not later.done()
            first = pool.submit(process_group._meet, config, store, 0, 2).result()
            assert not first.check(["of this start"])
            first.set("of this start", "yes")
            assert later.result().get("of this start") == b"yes"


def test_ranks_with_other_configurations_are_told() -> None:
    store, other = dist.HashStore(), TrainConfig(stages=2, seed=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(process_group._meet, other, store, 0, 2)
        with pytest.raises(ConfigError, match="rank 1 was started with other values than rank 0 for: seed, timeout"):
            process_group._meet(TrainConfig(stages=2, timeout=0.1), store, 1, 2)
        first.result()
