"""How a run is told to end early: it finishes the batches under way, saves a checkpoint, and ends as if it were over.

Under `penstock train` the launcher takes the signal (Ctrl-C, SIGTERM) and asks through a file, before torch elastic,
which would stop the workers, hears of it; a worker that gets SIGTERM there is ended because another one has failed, and
says what it was doing. Under torchrun workers get the signal themselves, and elastic leaves them 30 seconds.

A worker that fails by itself is not disturbed any more: its report matters more than its end.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import EndedError, PenstockError


class DrainRequest:
    """Whether somebody wants the run to end.

    Args:
        file: appears when the launcher asks; None under torchrun.

    Attributes:
        doing: says what this worker is doing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._asked = file, False
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
        signal.signal(number, signal.SIG_IGN)  # once is enough
        if isinstance(sys.exception(), PenstockError | RuntimeError):  # on its way: it says more
            return
        raise EndedError(f"{self.doing()}: ended by {signal.Signals(number).name}, because another worker has failed")
