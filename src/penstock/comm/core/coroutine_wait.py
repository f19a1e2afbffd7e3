"""Waiting as a coroutine: a rank yields what it waits for, and its caller decides how to wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.comm.core.ticket import Ticket
from penstock.comm.core.trace_recorder import Recorder
from penstock.timeline import Waiting


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
