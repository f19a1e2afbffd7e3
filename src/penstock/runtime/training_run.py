"""`TrainingRun`: what `Pipeline.run` returns, an iterator of reports that can be left, closed and interrupted."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock.runtime.rank.batch_reports import Report

_LOG = logging.getLogger(__name__)


class TrainingRun(Iterator[Report]):
    """A run of a pipeline, as an iterator of reports: it trains as far as reports are asked for.

    Leaving its loop, or `close`, finishes the batches under way. So does a first Ctrl-C while it works: these batches
    are reported, then `KeyboardInterrupt` is raised, and the pipeline is as good as after any run. A second Ctrl-C
    interrupts at once, and breaks the pipeline. (This holds in the main thread, where SIGINT has Python's own handler.)
    A peer that does not finish its part within the time-out breaks the pipeline, as in the loop; a run that is dropped
    and not closed warns of it. A run that is still open when the interpreter exits is abandoned.

    Args:
        reports: makes the reports; closed with the run.
        stop: asks the run to end.
    """

    def __init__(self, reports: Generator[Report], stop: Callable[[], None]) -> None:
        self._reports, self._stop = reports, stop
        self._begun = self._interrupted = False
        self._working = threading.Lock()

    def __repr__(self) -> str:
        """Return whether it has begun."""
        return f"<TrainingRun, {'begun' if self._begun else 'not begun'}>"

    def __next__(self) -> Report:
        self._begun = True
        try:
            with self._working_alone():
                return next(self._reports)
        except Exception as end:
            if self._interrupted:  # after what was under way, whether or not a loader has suffered from it
                self._interrupted = False
                raise KeyboardInterrupt from (None if isinstance(end, StopIteration) else end)
            raise

    def close(self) -> None:
        """Finish the batches under way, without reports.

        Raises:
            KeyboardInterrupt: there was a Ctrl-C meanwhile, or before, that has not been raised.
        """
        self._begun = True
        with self._working_alone():
            self._reports.close()
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def __del__(self) -> None:
        """Finish the batches under way; say so if that fails, or if nobody has asked for a report."""
        if not self._begun:
            said = "run() was called, but its reports were not asked for, so nothing was trained; write: "
            warnings.warn(f"{said}for report in pipeline.run(loader): ...", RuntimeWarning, stacklevel=2)
        elif not sys.is_finalizing():
            try:
                self._reports.close()
            except Exception as error:
                said = "a run was dropped whose batches under way could not be finished, so its pipeline is broken"
                warnings.warn(f"{said} (close() raises this): {error}", RuntimeWarning, stacklevel=2)

    @contextmanager
    def _working_alone(self) -> Iterator[None]:
        """Work on the run, in one thread at a time, in which the first SIGINT is a request to stop.

        Raises:
            PenstockError: somebody works on it already.
        """
        if not self._working.acquire(blocking=False):
            raise PenstockError(
                "this run is under way already: another thread, or what gives it its data, works on it; take its "
                "reports and close it in one thread"
            )
        try:
            with self._requesting():
                yield
        finally:
            self._working.release()

    @contextmanager
    def _requesting(self) -> Iterator[None]:
        """Let the first SIGINT be a request to stop."""
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not usual or self._interrupted or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._interrupted = True
        self._stop()
        _LOG.warning("interrupted: the batches under way are finished; a second Ctrl-C ends the run at once")
