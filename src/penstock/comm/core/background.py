"""A thread beside the one that computes: it waits for others, so that the rank does not have to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from penstock.comm.core.ticket import Ticket

_Job = tuple[Sequence[Ticket], Callable[[], Any]]


class Background:
    """Does what it is given in a thread of its own, one thing after another; there is none before the first.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._name, self._started = f"penstock {name}", False

    def later(self, tickets: Sequence[Ticket], work: Callable[[], Any]) -> None:
        """Do `work` after all that was given before; what it returns, or raises, becomes that of the tickets."""
        self._jobs.put((tickets, work))
        if not self._started:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._started = True

    def close(self) -> None:
        """Let the thread end once all it was given is done."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(*job)
            del job  # it may hold much memory until the next one comes


def _do(tickets: Sequence[Ticket], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except Exception as error:  # whoever waits for the ticket raises it
        for ticket in tickets:
            ticket.complete(error=error)
    else:
        for ticket in tickets:
            ticket.complete(result)
