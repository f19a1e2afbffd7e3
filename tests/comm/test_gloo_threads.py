"""Gloo's threads give way to the rank while it works, and are as before while its caller does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.comm.core import gloo_threads
from penstock.comm.core.gloo_threads import GlooThreads
from penstock.comm.core.ticket import LATENCY, Ticket, Wait
from penstock.job.cpus import Cpus, parts
from penstock.runtime.execute.executor import drive_one
from penstock.runtime.rank.batch_reports import Report
from support.pool import Pool

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has these policies")


def state(thread: int) -> tuple[int, set[int]]:
    return os.sched_getscheduler(thread), os.sched_getaffinity(thread)


@pytest.fixture
def thread() -> Iterator[int]:
    """A thread with the name of gloo's."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    number = other.native_id
    assert number is not None
    Path(f"/proc/self/task/{number}/comm").write_text("gloo_tcp_loop")
    yield number
    end.set()
    other.join()


def test_threads_give_way_while_the_rank_works(thread: int) -> None:
    before, seen = state(thread), []

    def run() -> Iterator[Report]:
        for batch in range(2):
            seen.append(state(thread))
            yield Report(batch, None, None, 0.0)

    for _ in drive_one(run(), 1.0, LATENCY, GlooThreads(1.0), str):
        assert state(thread) == before
    assert [(policy, len(cpus)) for policy, cpus in seen] == [(os.SCHED_BATCH, 1)] * 2
    assert state(thread) == before


def test_threads_are_as_before_after_a_failure(thread: int) -> None:
    before = state(thread)

    def run() -> Iterator[Report]:
        assert state(thread) == before  # which is not so: this fails
        yield Report(0, None, None, 0.0)

    with pytest.raises(AssertionError):
        next(drive_one(run(), 1.0, LATENCY, GlooThreads(1.0), str))
    assert state(thread) == before


def test_threads_follow_a_rank_that_waits(thread: int) -> None:
    """To the CPU to which the system has moved it."""
    ticket, here, seen = Ticket("here"), os.sched_getaffinity(0), []
    ticket.complete()

    def run() -> Iterator[Wait]:
        for cpu in sorted(here):
            os.sched_setaffinity(0, {cpu})
            yield Wait(ticket, "waiting")
            seen.append(state(thread)[1])

    try:
        assert list(drive_one(run(), 1.0, LATENCY, GlooThreads(1.0), str)) == []
    finally:
        os.sched_setaffinity(0, here)
    assert seen == [{cpu} for cpu in sorted(here)]


@pytest.mark.parametrize("cores", [None, 1.5, 16.0])
def test_threads_with_cores_of_their_own_are_left_alone(thread: int, cores: float | None) -> None:
    before, threads = state(thread), GlooThreads(cores)
    threads.give_way()
    assert state(thread) == before


def test_threads_of_which_somebody_has_decided_are_left_alone(thread: int) -> None:
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    before, threads = state(thread), GlooThreads(1.0)
    threads.give_way()
    assert state(thread) == before
    threads.restore()
    assert state(thread) == before


def test_nothing_is_restored_that_was_not_changed(thread: int) -> None:
    """A run that is dropped long after its last report must not undo what others have done since."""
    threads, cpu = GlooThreads(1.0), min(os.sched_getaffinity(0))
    threads.give_way()
    threads.restore()
    os.sched_setaffinity(thread, {cpu})
    threads.restore()
    assert state(thread) == (os.SCHED_OTHER, {cpu})


def test_a_cpu_that_is_not_known_is_not_followed(thread: int) -> None:
    threads = GlooThreads(1.0)
    threads.give_way()
    before = state(thread)
    threads._current_cpu = lambda: -1
    threads.follow()
    assert state(thread) == before


def test_a_thread_of_another_process_is_left_alone(thread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has the number that one of gloo's threads had before it ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        both = [gloo_threads._Thread(number, frozenset(os.sched_getaffinity(0))) for number in (other.pid, thread)]
        monkeypatch.setattr(gloo_threads, "_find_threads", lambda: both)
        threads = GlooThreads(1.0)
        threads.give_way()
        assert (state(other.pid)[0], state(thread)[0]) == (os.SCHED_OTHER, os.SCHED_BATCH)
        threads.restore()
        assert state(thread)[0] == os.SCHED_OTHER
        other.kill()


class Probe(nn.Module):
    """Notes how gloo's threads are scheduled while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), set[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= policies()
        return self.linear(x)


def policies() -> set[int]:
    numbers = [int(folder.name) for folder in Path("/proc/self/task").glob("*")]
    return {os.sched_getscheduler(number) for number in numbers if gloo_threads._is_gloo(number)}


def run_here(group: dist.ProcessGroup) -> tuple[set[int], set[int], set[int]]:
    probes = [Probe(), Probe()]
    pipeline = Pipeline(
        {"a": probes[0], "b": probes[1]},
        "1f1b",
        loss=F.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        microbatches=2,
        group=group,
    )
    data = [[(torch.ones(1, 4), torch.ones(1, 4))] * 2] * 2
    between = set().union(*(policies() for _ in pipeline.run(data)))
    return probes[0].seen | probes[1].seen, between, policies()


@pytest.mark.processes
def test_policy_of_two_processes(pool: Pool) -> None:
    few = parts([Cpus.of_this_process()] * 2)[0] <= gloo_threads._FEW
    within = {os.SCHED_BATCH if few else os.SCHED_OTHER}
    assert pool.submit(run_here, ranks=2) == [(within, {os.SCHED_OTHER}, {os.SCHED_OTHER})] * 2
