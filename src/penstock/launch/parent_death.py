"""Kills this process when its parent dies (Linux PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends, however it ends; does nothing outside Linux."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)
