"""Signals that end a run: how the launcher and the workers take them, and how a process ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end; Ctrl-C is for the launcher alone."""
_PR_SET_PDEATHSIG = 1  # prctl(2)


def take_default() -> None:
    """Let signals that end a run, which `preload` blocks, kill this worker, except Ctrl-C: a terminal sends it, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends, however it ends; does nothing outside Linux."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


class LauncherSignals:
    """Handles signals while workers run: the first asks them to drain, the second kills them.

    SIGHUP never counts as the second one: a closed terminal may send several, and systemd one after its SIGTERM. A
    process that ignores it (under nohup) keeps ignoring it.

    Args:
        drain: the file to create at the first signal.
        kills: the first signal kills workers already, whichever it is, as nothing is lost with them.

    Attributes:
        fatal: the number of the signal that kills workers, if it came.
    """

    def __init__(self, drain: Path, kills: bool = False) -> None:
        self.drain, self._kills = drain, kills
        self.fatal: int | None = None
        self._hung_up = False

    def __enter__(self) -> LauncherSignals:
        """Install the signal handlers."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        if threading.current_thread() is not threading.main_thread():
            numbers = []
        self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers; SIGHUP is ignored if it came, as another one may follow."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._hung_up and number == signal.SIGHUP else handler)

    def _take(self, number: int, *_: object) -> None:
        self._hung_up |= number == signal.SIGHUP
        if self._kills:
            self.fatal = number
        elif not self.drain.exists():
            self.drain.touch()
        elif number != signal.SIGHUP:
            self.fatal = number
