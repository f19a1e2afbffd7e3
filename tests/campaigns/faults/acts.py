"""What can happen to a job: signals to its processes, to several of them, one after another; a disk that is full."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable

import psutil

from campaigns.faults.job import Job

Act = Callable[[Job, int, random.Random], bool]
"""Lets a fault happen to a job, a rank of it or a host; False if it came too late."""


def to_worker(number: int) -> Act:
    """A signal to one worker."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        workers = job.workers()
        return rank < len(workers) and _send(workers[rank], number)

    return act


def in_model(deed: str) -> Act:
    """One worker fails, or hangs, in the code of its model from now on (`planted`)."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        (job.temporary / f"{deed}-{rank}").touch()
        return not job.over

    return act


def to_launcher(number: int) -> Act:
    """A signal to the launcher; of two hosts, to that of one of them."""
    return lambda job, rank, dice: _send(job.launchers[rank % len(job.launchers)].pid, number)


def to_helper(word: str, number: int) -> Act:
    """A signal to a process of the launcher, by a word of its command line."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        process = job.helper(word)
        return process is not None and _send(process, number)

    return act


def to_all(number: int) -> Act:
    """A signal to every process of the job, as systemd sends it."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        return _send_all(job.everybody(), number) > 0

    return act


def to_all_workers(number: int) -> Act:
    """A signal to all workers at once, as when the memory of the machine is exhausted."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        return 0 < len(workers := job.workers()) == _send_all(workers, number)

    return act


def to_host(number: int) -> Act:
    """A signal to all processes of one of two hosts."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        agent = psutil.Process(job.launchers[rank % 2].pid)
        processes = [process.pid for process in (*agent.children(recursive=True), agent)]
        return len(processes) == _send_all(processes, number)

    return act


def after(first: Act, then: Act, least: float, most: float) -> Act:
    """One act, and another one after some seconds; the first decides whether they came in time."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        if not first(job, rank, dice):
            return False
        time.sleep(dice.uniform(least, most))
        with contextlib.suppress(psutil.Error):
            then(job, rank, dice)
        return True

    return act


def limit(what: int, number: int) -> Act:
    """A limit of one worker: no file may grow beyond so many bytes (as on a full disk), or be opened beyond so many."""

    def act(job: Job, rank: int, dice: random.Random) -> bool:
        workers = job.workers()
        if rank >= len(workers):
            return False
        try:
            _, most = resource.prlimit(workers[rank], what)
            resource.prlimit(workers[rank], what, (number if number >= 0 else most, most))
        except OSError:
            return False
        return True

    return act


def checkpoints_blocked(job: Job, rank: int, dice: random.Random) -> bool:
    """A file stands where the folder of checkpoints was."""
    if job.folder is None or job.over:
        return False
    place = job.folder / "checkpoints"
    for _ in range(100):  # somebody may be writing into it
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            place.touch(exist_ok=False)
            return True
    return False


def metrics_removed(job: Job, rank: int, dice: random.Random) -> bool:
    """The record of the run is removed."""
    with contextlib.suppress(OSError):
        if job.folder is not None:
            os.unlink(job.folder / "metrics.jsonl")
            return True
    return False


def folder_removed(job: Job, rank: int, dice: random.Random) -> bool:
    """The run folder is removed, with all that is in it."""
    if job.folder is None or job.over:
        return False
    place = job.folder
    while place.exists():
        shutil.rmtree(place, ignore_errors=True)
    return True


def _send(process: int, number: int) -> bool:
    """Signal a process; False if it has ended."""
    try:
        if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
            return False
        os.kill(process, number)
    except (psutil.Error, ProcessLookupError):
        return False
    return True


def _send_all(processes: list[int], number: int) -> int:
    """Signal processes; returns how many of them had not ended."""
    return sum([_send(process, number) for process in processes])


def paused(act: Callable[[int], Act], least: float, most: float) -> Act:
    """Somebody is stopped and goes on after some seconds."""
    return after(act(signal.SIGSTOP), act(signal.SIGCONT), least, most)
