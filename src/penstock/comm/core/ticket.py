"""Tickets: completions of work in the background; how a rank waits for them, and the thread that completes them."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from penstock.comm.core.devices import issuing_stream
from penstock.comm.core.trace_recorder import Recorder
from penstock.errors import EndedError, TransportError
from penstock.timeline import Waiting

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


_Job = tuple[Sequence[Ticket], Callable[[], Any], AbstractContextManager[Any]]


class Background:
    """Runs jobs one after another in a thread, which is started with the first job.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._name, self._started = f"penstock {name}", False

    def later(self, tickets: Sequence[Ticket], work: Callable[[], Any]) -> None:
        """Submit a job; its result, or the exception that it raises, completes the tickets.

        What it issues to an accelerator comes after what this thread has issued, also on a stream of the caller's own.
        """
        self._jobs.put((tickets, work, issuing_stream()))
        if not self._started:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._started = True

    def close(self) -> None:
        """Let the thread end after all jobs that have been submitted."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            tickets, work, stream = job
            with stream:
                settle(tickets, work)
            del job, tickets, work  # it may hold much memory, and the next job may come late


def settle(tickets: Sequence[Ticket], work: Callable[[], Any]) -> None:
    """Do work; its result, or the exception that it raises, completes the tickets."""
    try:
        result = work()
    except EndedError:  # by a signal, in the midst of the work; no ticket is to blame
        raise
    except Exception as error:  # raised again where the ticket is waited for
        for ticket in tickets:
            ticket.complete(error=error)
    else:
        for ticket in tickets:
            ticket.complete(result)


class Wait(NamedTuple):
    """A request of a rank to wait for `ticket` before it continues with `what`."""

    ticket: Ticket
    what: object


class WaitingFor(NamedTuple):
    """What a rank is doing while it waits, formatted when somebody asks."""

    what: object
    where: object

    def __str__(self) -> str:
        return f"{self.what}, waiting for {self.where}"


def wait_for(
    recorder: Recorder, ticket: Ticket, what: object, cause: str, kind: Waiting, peer: int = -1
) -> Iterator[Wait]:
    """Yield a `Wait` unless the ticket is done, and record how long it took.

    Args:
        recorder: of the rank.
        ticket: to wait for.
        what: what the rank is about to do, for error messages.
        cause: the peer, and what it still has to do, for the trace.
        kind: of wait.
        peer: the rank waited for, or -1.

    Raises:
        TransportError: the operation failed.
    """
    if not ticket.done:
        start, recorder.doing = recorder.now(), WaitingFor(what, ticket.where)
        yield Wait(ticket, what)
        recorder.doing = what
        end = max(start, ticket.done_at)  # not when the rank was resumed, where ranks take turns
        label = f"wait for {cause}"
        recorder.add("compute", start, end, kind, label, cause=cause, peer=peer)
    ticket.check(what)
