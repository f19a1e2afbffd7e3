"""A limit on the time of a test that may hang."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooLongError(BaseException):
    """What was to end soon has not; no handler of exceptions in between catches this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooLongError` if a `with` block takes longer; in the main thread only."""

    def end(*_: object) -> None:
        raise TooLongError(f"longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
