"""Priorities among the transfers of a rank that share a link: messages between stages go before sums.

Somebody waits for a message, while the sum of a gradient is wanted only by the update. So a sum travels in pieces, few
of which are under way at a time, and its thread posts no further one while a message of this rank is. Nothing tells a
rank when a message has arrived, so it reckons with the pace of the pieces: a message of n bytes is under way for n
times what a byte of a piece has taken. That ends by itself, so no rank waits for another one that waits for the sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST = 1.0  # seconds for which messages may hold up a piece, should the pace be far off
_FORGET = 1.1  # by how much the pace may grow from piece to piece: the quickest of late ones were not held up


class TransferPriority:
    """Keeps account of the messages of one rank that are under way.

    One thread posts messages, others pieces of sums (and of weights); only these write the pace, which may be rough.

    Args:
        now: the time, in seconds.
        sleep: for so many seconds.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._now, self._sleep = now, sleep
        self._pace = 0.0  # seconds a byte; unknown before pieces have been seen
        self._until = 0.0  # when the messages posted so far have arrived

    def message(self, nbytes: int) -> None:
        """Take note of a message that has been posted."""
        self._until = max(self._until, self._now()) + nbytes * self._pace

    def piece(self, nbytes: int, seconds: float) -> None:
        """Take note of how long a piece has taken, with others before it under way all the time."""
        pace = seconds / nbytes
        self._pace = min(pace, self._pace * _FORGET) if self._pace else pace

    def yield_to_messages(self) -> bool:
        """Wait until the messages posted so far have arrived; return whether there were any."""
        end = self._now() + _LONGEST
        waited = False
        while (left := min(self._until, end) - self._now()) > 0:
            self._sleep(left)
            waited = True
        return waited
