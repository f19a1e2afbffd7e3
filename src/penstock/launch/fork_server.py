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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

_PATIENCE = 1.0  # seconds for the server to be gone after its connection was
_TRY = "python -c 'import penstock.train.loop'"  # what it imports
_LONGEST_FOLDER = 64  # characters; the path of a socket may have 107, of which multiprocessing adds about 32


def start_method(preload: Sequence[str] = ()) -> str:
    """Choose how workers start: forked from the server, which this starts, or spawned if that is impossible.

    Args:
        preload: modules that the server imports, if it does not run yet, for all workers that this process ever forks.
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


def why_not_started(error: EOFError | OSError) -> str:
    """Return what happened when workers were started, and what to do: mostly the server has died.

    Args:
        error: what the launcher got of it: a broken connection to the fork server, or an error of the system.
    """
    ended = _how_it_ended()
    before = "workers could not be started: "
    if ended is None:
        said = (isinstance(error, OSError) and error.strerror) or repr(error)
        return f"{before}{said}. Look for limits of processes, memory and open files (ulimit -a), and try again"
    before += "the process that imports everything for them "
    if ended.si_code == os.CLD_EXITED:
        return (
            f"{before}ended with exit code {ended.si_status} before it was ready. "
            f"If no traceback stands above, `{_TRY}` shows what it cannot import"
        )
    if ended.si_status == signal.SIGKILL:
        advice = "A machine without memory left kills processes so (`dmesg` tells): free some, or take fewer processes"
    else:
        advice = f"If nobody has sent that, a library has crashed; `{_TRY}` may show which"
    return f"{before}was ended by {signal.Signals(ended.si_status).name}. {advice}, and start again"


def _how_it_ended() -> os.waitid_result | None:
    """Return how the server has ended; None if it lives.

    It is not waited for, which multiprocessing does itself before it starts another one.
    """
    process = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    until = time.monotonic() + _PATIENCE
    while process is not None and time.monotonic() < until:
        try:
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # of another process, or waited for
            return None
        if ended is not None:
            return ended
        time.sleep(0.01)
    return None
