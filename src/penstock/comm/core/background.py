"""A background thread that waits for other processes, so that the computing thread does not have to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from penstock.comm.core.devices import issuing_stream
from penstock.comm.core.ticket import Ticket
from penstock.errors import EndedError

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
