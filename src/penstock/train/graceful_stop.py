"""Ends a run early on request: it finishes the batches in flight, saves a checkpoint, and exits normally.

Under `penstock train` the launcher receives the signal (Ctrl-C, SIGTERM, SIGHUP) and passes the request on through a
file, before torch elastic, which would kill the workers, notices. A worker that receives SIGTERM there is being ended,
mostly because another one has failed (the launcher finds out), and reports what it was doing; unless the launcher makes
the request at the same time, because all processes of the job were signalled (by systemd or Slurm, for example). Under
any other launcher workers receive the signal themselves; torchrun gives them 30 seconds. Workers whose torchrun has
died, which has told nobody, make the request as well; if it was to start workers again, they fail instead, so that
those of the other machines do.

A worker that is already failing is not interrupted: its report matters more than a prompt exit. Nor is an import: a
library may take an error in the midst of it for one of its own.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.errors import EndedError
from penstock.job.place import Agent

_MOMENT = 0.4  # seconds that a launcher may take to notice a signal that a worker has received as well
_LATER = 0.02  # seconds until a signal that cannot be taken now comes again


class DrainRequest:
    """The request to end the run.

    Args:
        file: exists when the launcher has made the request; None under other launchers.
        agent: of torchrun, which may die.

    Attributes:
        doing: returns what this worker is doing.
    """

    def __init__(self, file: Path | None, agent: Agent | None = None) -> None:
        self._file, self._agent, self._asked, self._told = file, agent, False, False
        self.doing: Callable[[], str] = lambda: "starting"

    @property
    def asked(self) -> bool:
        """Whether the request has been made by now.

        Raises:
            EndedError: this worker's torchrun, which was to start workers again, has died.
        """
        if not self._asked and self._file is not None:
            self._asked = self._file.exists()
        if not self._asked and self._agent is not None and self._agent.is_gone:
            if self._agent.starts_again:
                raise EndedError(f"{self.doing()}: the torchrun of this machine has died")
            self._asked = True
        return self._asked

    def end_agent(self) -> None:
        """Ask the torchrun of this machine to end: elastic tells only the machines that were signalled."""
        if self._agent is not None:
            self._agent.end()

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle signals as this module describes, within a `with` block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        launched = self._file is not None
        handlers = {
            signal.SIGINT: signal.SIG_IGN if launched else self._ask,  # Ctrl-C also reaches the workers of a terminal
            signal.SIGTERM: self._end if launched else self._ask,
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            handlers[signal.SIGHUP] = handlers[signal.SIGTERM]
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        except BaseException:
            before |= dict.fromkeys(before, signal.SIG_IGN)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        if _imports(frame):
            main = threading.main_thread().ident
            threading.Timer(_LATER, signal.pthread_kill, [main, number]).start()
            return
        if not self._told and self._launcher_asks():
            self._told = True
            return
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the report
        if isinstance(sys.exception(), Exception) and not isinstance(sys.exception(), queue.Empty):
            return  # another error is being raised, and says more
        raise EndedError(f"{self.doing()}: ended by {signal.Signals(number).name}")

    def _launcher_asks(self) -> bool:
        """Return whether the launcher makes the request at about this moment."""
        assert self._file is not None
        deadline = time.monotonic() + _MOMENT
        while not self._file.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(_MOMENT / 20)
        return time.time() - self._file.stat().st_mtime < 2 * _MOMENT


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported where a signal has interrupted this process."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False
