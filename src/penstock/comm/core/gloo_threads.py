"""Gloo's threads of this process, and how the system schedules them while a rank with no more than one core works.

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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_NAME = b"gloo_tcp"  # the beginning of the name that gloo gives its threads
_FEW = 1.0 + 1e-6  # cores of a rank, of which gloo finds none that the rank does not use


class _Thread(NamedTuple):
    """A thread that the system schedules as usual, and where."""

    number: int
    cpus: frozenset[int]


class GlooThreads:
    """Those of gloo's threads in this process that take the core of the rank.

    Args:
        cores: that this process has, which may be a part of one; many if None.
    """

    def __init__(self, cores: float | None = None) -> None:
        self._threads = _find_threads() if cores is not None and cores <= _FEW else []
        self._current_cpu = getattr(ctypes.CDLL(None), "sched_getcpu", None) if self._threads else None
        self._changed, self._cpu = False, -1  # -1: none is known

    def give_way(self) -> None:
        """Have them take no core away, and run where this thread does."""
        if self._current_cpu is not None:
            self._changed = True
            self._threads = [thread for thread in self._threads if _is_gloo(thread.number)]
            for thread in self._threads:
                _set_policy(thread.number, os.SCHED_BATCH)
            self.follow()

    def follow(self) -> None:
        """Have them run where this thread does, which the system may have moved."""
        if self._changed and self._current_cpu is not None and (cpu := self._current_cpu()) != self._cpu and cpu >= 0:
            self._cpu = cpu
            for thread in self._threads:
                _set_cpus(thread.number, {cpu})

    def restore(self) -> None:
        """Have the system schedule them as before."""
        if self._changed:
            self._changed, self._cpu = False, -1
            for thread in self._threads:
                _set_policy(thread.number, os.SCHED_OTHER)
                _set_cpus(thread.number, thread.cpus)


def _find_threads() -> list[_Thread]:
    """Find those that are scheduled as usual; of others somebody has decided how."""
    numbers = [int(folder.name) for folder in Path("/proc/self/task").glob("*")]  # there is none but on Linux
    found = []
    for number in filter(_is_gloo, numbers):
        with suppress(OSError):  # the thread has ended
            if os.sched_getscheduler(number) == os.SCHED_OTHER:
                found.append(_Thread(number, frozenset(os.sched_getaffinity(number))))
    return found


def _is_gloo(thread: int) -> bool:
    """Whether it is one of gloo's still; the system gives its number to others when it has ended."""
    try:
        file = os.open(f"/proc/self/task/{thread}/comm", os.O_RDONLY)  # twice a batch: Path takes four times as long
    except OSError:
        return False
    try:
        return os.read(file, len(_NAME)) == _NAME
    except OSError:  # it has ended in this moment
        return False
    finally:
        os.close(file)


def _set_policy(thread: int, policy: int) -> None:
    with suppress(OSError):  # the thread has ended, or the system does not allow it
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def _set_cpus(thread: int, cpus: set[int] | frozenset[int]) -> None:
    with suppress(OSError):
        os.sched_setaffinity(thread, cpus)
