"""Gloo's threads of this process, and how the system schedules them while a rank with one core works.

Each process group has a thread that moves its messages. One that arrives wakes it, often on the core of a rank that is
in the midst of a send, which it takes away. To go on it needs the lock of the connection; while the sender holds that,
gloo asks for it again and again (`Pair::handleEvents` in gloo/transport/tcp/pair.cc: `try_to_lock` under a
level-triggered epoll), until its time slice ends: a core is lost for 2 to 4 milliseconds, or both where the ranks do
the same to each other. So these threads take no core away (`SCHED_BATCH`), and they run on the CPU of their rank's own
thread, which gives way to them whenever it waits. Where a rank has more cores than one, they find another.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

_Step = TypeVar("_Step")
_NAME = "gloo_tcp"  # the beginning of the name that gloo gives its threads
_ENOUGH = 2.0  # cores of a rank, of which gloo finds one that the rank does not use


class _Thread(NamedTuple):
    """A thread, and how the system scheduled it at first."""

    number: int
    policy: int
    cpus: frozenset[int]


class GlooThreads:
    """Those of gloo's threads in this process that take the core of the rank.

    Args:
        cores: that this process has, which may be a part of one; many if None.
    """

    def __init__(self, cores: float | None = None) -> None:
        self._threads = _find_threads() if cores is not None and cores < _ENOUGH else []
        self._current_cpu = getattr(ctypes.CDLL(None), "sched_getcpu", None) if self._threads else None

    def during(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        """Return an iterator that has them give way while it works, not while its caller does."""
        return steps if self._current_cpu is None else self._each(steps)

    def _each(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        while True:
            self._give_way()
            try:
                step = next(steps)
            except StopIteration:
                return
            finally:
                self._restore()
            yield step

    def _give_way(self) -> None:
        assert self._current_cpu is not None
        here = {self._current_cpu()}
        for thread in self._threads:
            _schedule(thread.number, os.SCHED_BATCH, here)

    def _restore(self) -> None:
        for thread in self._threads:
            _schedule(thread.number, thread.policy, thread.cpus)


def _find_threads() -> list[_Thread]:
    found = []
    for folder in Path("/proc/self/task").glob("*"):  # there is none but on Linux
        with suppress(OSError):  # the thread has ended
            if (folder / "comm").read_text().startswith(_NAME):
                number = int(folder.name)
                found.append(_Thread(number, os.sched_getscheduler(number), frozenset(os.sched_getaffinity(number))))
    return found


def _schedule(thread: int, policy: int, cpus: set[int] | frozenset[int]) -> None:
    with suppress(OSError):  # the thread has ended, or the system does not allow it
        os.sched_setscheduler(thread, policy, os.sched_param(0))
        os.sched_setaffinity(thread, cpus)
