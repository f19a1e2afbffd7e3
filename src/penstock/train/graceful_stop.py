"""How a run is told to end early: it finishes the batches under way, saves a checkpoint, and ends as if it were over.

Under `penstock train` the launcher takes the signal (Ctrl-C, SIGTERM) and asks through a file, before torch elastic,
which would stop the workers, hears of it. A worker that gets SIGTERM there is ended because another one has failed, and
says what it was doing; unless the launcher asks at the same moment, because all processes of the job were told (by
systemd or Slurm, say). Under torchrun workers get the signal themselves, and elastic leaves them 30 seconds.

A worker that fails by itself is not disturbed any more: its report matters more than its end.
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

from penstock.errors import EndedError

_MOMENT = 0.4  # seconds that a launcher may take to hear of a signal that a worker has got as well


class DrainRequest:
    """Whether somebody wants the run to end.

    Args:
        file: appears when the launcher asks; None under torchrun.

    Attributes:
        doing: says what this worker is doing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._asked, self._told = file, False, False
        self.doing: Callable[[], str] = lambda: "starting"

    @property
    def asked(self) -> bool:
        """Whether it has been asked for by now."""
        if not self._asked and self._file is not None:
            self._asked = self._file.exists()
        return self._asked

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Meanwhile signals mean what this module says."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        launched = self._file is not None
        handlers = {
            signal.SIGINT: signal.SIG_IGN if launched else self._ask,  # Ctrl-C goes to the workers of a terminal, too
            signal.SIGTERM: self._end if launched else self._ask,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        except BaseException:
            before[signal.SIGTERM] = signal.SIG_IGN
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _end(self, number: int, *_: object) -> None:
        if not self._told and self._launcher_asks():
            self._told = True
            return
        signal.signal(number, signal.SIG_IGN)  # once is enough
        if isinstance(sys.exception(), Exception) and not isinstance(sys.exception(), queue.Empty):
            return  # it is on its way, and says more
        raise EndedError(f"{self.doing()}: ended by {signal.Signals(number).name}, because another worker has failed")

    def _launcher_asks(self) -> bool:
        """Whether the launcher asks for the end at this moment."""
        assert self._file is not None
        deadline = time.monotonic() + _MOMENT
        while not self._file.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(_MOMENT / 20)
        return time.time() - self._file.stat().st_mtime < 2 * _MOMENT
