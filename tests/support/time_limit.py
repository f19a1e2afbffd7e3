"""A limit on the time of a test that may hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 12  # times as long on the clock: a busy machine is no fault


class TooLongError(BaseException):
    """What was to end soon has not; no handler of exceptions in between catches this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooLongError` if a `with` block takes more CPU time, or waits for much longer; in the main thread only.

    The error comes wherever the thread is, possibly amid an import or a callback from C++, which may not survive it:
    so it must not come only because other processes have the CPU.
    """

    def end(*_: object) -> None:
        raise TooLongError(f"longer than {seconds:g} seconds")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, PATIENCE * seconds))
    before = [signal.signal(number, end) for number, _, _ in timers]
    for _, timer, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)
        for (number, _, _), handler in zip(timers, before, strict=True):
            signal.signal(number, handler)
