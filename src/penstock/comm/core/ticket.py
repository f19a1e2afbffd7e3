"""A ticket: the completion of something that runs in the background, with its result or its error."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from penstock.errors import TransportError

_LOOK = 1.0  # seconds between two questions whether a wait is in vain
_NAP = 50e-6  # seconds between two looks: too short for a core to fall asleep, but left to others
_give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))  # not every system has it


class Polling(NamedTuple):
    """For how long a wait looks before it sleeps.

    Attributes:
        keen: seconds in which it looks as often as it can.
        polled: seconds after which it sleeps until it is woken; until then it looks every 50 microseconds.
    """

    keen: float
    polled: float


LATENCY = Polling(keen=300e-6, polled=1.0)
"""For a core of one's own: messages between small stages take no longer than the first, pipelines at work than both."""
SHARED = Polling(keen=0.0, polled=0.0)
"""For cores that others want: a wait takes none of their time, and ends later."""


class Ticket:
    """The completion of a posted SEND or RECV, or of anything else that others have to do their part of.

    Args:
        where: the lane, for messages.
        nbytes: memory that a posted RECV holds ready.

    Attributes:
        result: of what was posted; for a RECV the message, until it is used.
        made_at, done_at: when it was posted and completed, on the clock of `time.perf_counter`.
        error: why it never will.
    """

    __slots__ = ("_done", "_followers", "_pending", "done_at", "error", "made_at", "nbytes", "result", "where")
    _lock = threading.Lock()  # one for all: making one for each takes longer than the few instructions under it

    def __init__(self, where: object, nbytes: int = 0) -> None:
        self.where, self.nbytes = where, nbytes
        self.result: Any = None
        self.error: BaseException | None = None
        self.made_at, self.done_at, self._done = time.perf_counter(), 0.0, False
        self._pending: threading.Event | None = None  # for waiters that have stopped polling
        self._followers: Sequence[Callable[[], None]] = ()

    @property
    def done(self) -> bool:
        """Whether it has completed or failed."""
        return self._done

    def complete(self, result: Any = None, error: BaseException | None = None) -> None:
        """Mark as completed or failed."""
        self.result, self.error, self.done_at = result, error, time.perf_counter()
        with self._lock:
            self._done = True
            pending = self._pending
        if pending is not None:
            pending.set()
        for follow in self._followers:
            follow()

    def then(self, follow: Callable[[], None]) -> None:
        """Call `follow` as soon as this has completed or failed, in whatever thread completes it."""
        with self._lock:
            if not self._done:
                self._followers = (*self._followers, follow)
                return
        follow()

    def settles(self, timeout: float, polling: Polling = LATENCY) -> bool:
        """Block until done, or for `timeout` seconds; return whether it is done.

        At first it may poll: a core that has fallen asleep comes back slower, on virtual machines by up to a tenth of
        the work that follows (docs/benchmarks.md). A core that others want is theirs at every look.
        """
        start = now = time.perf_counter()
        keen, polled = min(timeout, polling.keen), min(timeout, polling.polled)
        while not self.done and now - start < keen:
            _give_way()
            now = time.perf_counter()
        while not self.done and now - start < polled:
            time.sleep(_NAP)
            now = time.perf_counter()
        if self.done:
            return True
        self._stop_polling()
        with self._lock:
            if self._done:
                return True
            self._pending = self._pending or threading.Event()
        self._pending.wait(max(0.0, start + timeout - time.perf_counter()))
        return self._done

    def _stop_polling(self) -> None:
        """Have it completed by a thread, if that takes somebody who looks."""

    def wait(
        self, timeout: float, what: object, polling: Polling = LATENCY, failed: Callable[[], str] = lambda: ""
    ) -> None:
        """Block until done.

        Args:
            timeout: seconds.
            what: what the caller was about to do, for messages.
            polling: for how long it looks before it sleeps.
            failed: asked now and then why it will never be done; nothing if it may.

        Raises:
            TransportError: the peer is gone, or nothing came in time.
        """
        end, look = time.perf_counter() + timeout, min(_LOOK, timeout / 4)
        done = self.settles(look, polling)
        while not done and (left := end - time.perf_counter()) > 0:
            if reason := failed():
                raise TransportError(f"{what}: nothing comes on {self.where} any more: {reason}")
            done = self.settles(min(look, left), SHARED)
        if not done:
            raise TransportError(
                f"{what}: nothing moved on {self.where} within {timeout:g} seconds; the peer is stalled or dead"
            )
        self.check(what)

    def check(self, what: object) -> None:
        """Raise if it failed."""
        if self.error is not None:
            raise TransportError(f"{what}: {self.where} broke: {brief(self.error)}") from self.error


def brief(error: BaseException) -> str:
    """What an error says, without the place in gloo's sources and gloo's advice."""
    return re.sub(r"^\[\S+\.cc:\d+\] |\. This is typically caused by .*", "", str(error), flags=re.DOTALL)


def after_all(tickets: Sequence[Ticket], follow: Callable[[], None]) -> None:
    """Call `follow` as soon as all have completed or failed."""
    if tickets:
        tickets[0].then(lambda: after_all(tickets[1:], follow))
    else:
        follow()
