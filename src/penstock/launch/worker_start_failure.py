"""Says why workers could not be started: mostly because the process that they are forked from has died."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import forkserver

_PATIENCE = 1.0  # seconds for the process to be gone after its connection was
_TRY = "python -c 'import penstock.train.loop'"  # what it imports


def why_not_started(error: EOFError | OSError) -> str:
    """Return what happened when workers were started, and what to do.

    Args:
        error: what the launcher got of it: a broken connection to the fork server, or an error of the system.
    """
    before = "workers could not be started: "
    ended = _how_it_ended()
    if ended is None:
        return f"{before}{_said(error)}. Look for limits of processes, memory and open files (ulimit -a), and try again"
    number, exited = ended
    if exited:
        return (
            f"{before}the process that imports everything for them ended with exit code {number} before it was ready. "
            f"If no traceback stands above, `{_TRY}` shows what it cannot import"
        )
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        advice = "A machine without memory left kills processes so (`dmesg` tells): free some, or take fewer processes"
    else:
        advice = f"If nobody has sent that, a library has crashed; `{_TRY}` may show which"
    return f"{before}the process that imports everything for them was ended by {name}. {advice}, and start again"


def _said(error: EOFError | OSError) -> str:
    return (isinstance(error, OSError) and error.strerror) or repr(error)


def _how_it_ended() -> tuple[int, bool] | None:
    """Return the signal or the exit code of the fork server, and whether it is an exit code; None if it lives.

    It is not waited for, which multiprocessing does itself before it starts another one.
    """
    process = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    until = time.monotonic() + _PATIENCE
    while process is not None:
        try:
            found = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # of another process, or waited for
            return None
        if found is not None:
            return found.si_status, found.si_code == os.CLD_EXITED
        if time.monotonic() > until:
            return None
        time.sleep(0.01)
    return None
