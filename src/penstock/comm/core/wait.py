"""How a rank waits: it says for what, and whoever drives it decides how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.comm.core.recorder import Recorder
from penstock.comm.core.ticket import Ticket
from penstock.timeline import Interval, Waiting


class Wait(NamedTuple):
    """The rank needs `ticket` before it can go on with `what`."""

    ticket: Ticket
    what: str


def wait_for(
    recorder: Recorder, ticket: Ticket, what: str, cause: str, kind: Waiting, peer: int = -1
) -> Iterator[Wait]:
    """Wait unless it is done, and take down how long.

    Args:
        recorder: of the rank.
        ticket: what is waited for.
        what: what the rank is about to do, for messages.
        cause: whom it waits for, and what they have to do.
        kind: of wait.
        peer: the rank waited for, if it is one.

    Raises:
        TransportError: it failed.
    """
    if not ticket.done:
        start, recorder.doing = recorder.now(), f"{what}, waiting for {ticket.where}"
        yield Wait(ticket, what)
        recorder.doing = what
        end = max(start, recorder.at(ticket.done_at))  # not when the rank's turn came, where ranks take turns
        label = f"wait for {cause}"
        recorder.add(Interval(recorder.rank, "compute", start, end, kind, label, cause=cause, peer=peer))
    ticket.check(what)
