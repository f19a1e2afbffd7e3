"""The process that workers are forked from: it has imported everything for them.

It may be started before this process has imported torch itself, so that both import at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

_LONGEST_FOLDER = 64  # characters; the path of a socket may have 107, of which multiprocessing adds about 32


def start_method(preload: Sequence[str] = ()) -> str:
    """Choose how workers start: forked from the server, which this starts, or spawned if that is impossible.

    Args:
        preload: modules that the server imports, if it does not run yet.
    """
    # Not every system library survives a fork, and the server's socket is in the folder for temporary files.
    if sys.platform != "linux" or len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        return "spawn"
    multiprocessing.set_forkserver_preload(["penstock.launch.preload", *preload])
    with workers_environment(), _ignoring(signal.SIGINT):  # which is inherited
        with _ignoring(signal.SIGHUP):
            resource_tracker.ensure_running()  # a closed terminal signals it, too, and without it workers complain
        forkserver.ensure_running()  # in this thread: the server is killed when the thread that started it ends
    return "forkserver"


@contextmanager
def workers_environment() -> Iterator[None]:
    """Set variables that the server and workers inherit, while the block runs."""
    changes = {"PYTHONSAFEPATH": "1"}  # else the fork server, and spawned workers, import from the working folder first
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        changes["GLOO_SOCKET_IFNAME"] = "lo"
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _ignoring(number: int) -> Iterator[None]:
    """Ignore a signal meanwhile, where that can be said: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
