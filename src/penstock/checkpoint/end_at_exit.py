"""Ends an object in order at the end of Python, before daemon threads are stopped wherever they are."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import weakref
from contextlib import suppress
from functools import partial
from typing import Protocol


class _Ends(Protocol):
    def end(self) -> None: ...


def end_at_exit(owner: _Ends) -> None:
    """Call the method `end` of an object at the end of Python, unless the object is gone by then.

    Python calls what was registered last first, so whoever wants to end at once registers that later.
    """
    hook = partial(_end, weakref.ref(owner))
    atexit.register(hook)
    weakref.finalize(owner, atexit.unregister, hook).atexit = False


def _end(found: weakref.ref[_Ends]) -> None:
    owner = found()
    if owner is None:
        return
    try:
        owner.end()
    except KeyboardInterrupt:  # the end is to come at once, and a thread that is amid code in C++ would abort Python
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(128 + signal.SIGINT)
