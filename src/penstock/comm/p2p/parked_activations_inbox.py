"""Parked activations on their way to this rank: HOLD and FETCH take them at the first look after they have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.comm.core.coroutine_wait import Wait
from penstock.comm.core.ticket import Ticket
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.p2p.inbox import Inbox
from penstock.comm.p2p.messages_by_microbatch import MessageBuffer
from penstock.comm.p2p.transport import Receiver
from penstock.schedule.machine.instructions import Route
from penstock.timeline import Waiting


class _Taking(NamedTuple):
    """Parked activations that are on their way, and what becomes of them."""

    inbox: ParkedInbox
    first: int
    batch: int
    what: object
    use: Callable[[], None]


class ParkedLane:
    """The RECVs of one lane of parked activations that are posted and not taken.

    Args:
        window: how many there may be. Transports count on it: with more, RECVs would be posted before it is known how
            large messages are.
        recorder: of the time that it takes to take them.
    """

    def __init__(self, window: int, recorder: Recorder) -> None:
        self._window, self._recorder = window, recorder
        self._open: dict[Ticket, _Taking | None] = {}  # in the order in which they come

    def add(self, ticket: Ticket) -> None:
        """Note a RECV that has been posted."""
        self._open[ticket] = None

    def take(self, ticket: Ticket, taking: _Taking) -> None:
        """Take what a RECV was posted for, now or when it has come."""
        if not ticket.done:
            self._open[ticket] = taking
            return
        del self._open[ticket]
        taking.inbox.hand_over(taking)

    def settle(self) -> None:
        """Take what has come since."""
        recorder = self._recorder
        for ticket, taking in [*self._open.items()]:
            if taking is not None and ticket.done:
                start = recorder.now()
                del self._open[ticket]
                taking.inbox.hand_over(taking)
                label, end = f"take {taking.inbox.name} {taking.first}", recorder.now()
                recorder.add("compute", start, end, Waiting.POST, label)

    def make_room(self) -> Iterator[Wait] | None:
        """Take what has come; an iterator of waits if no RECV may be posted before more has."""
        self.settle()
        return self._wait_for_room() if len(self._open) >= self._window else None

    def _wait_for_room(self) -> Iterator[Wait]:
        while len(self._open) >= self._window:
            first = next(taking for taking in self._open.values() if taking is not None)
            yield from first.inbox.wait(first.first, first.what)
            self.settle()


class ParkedInbox(Inbox):
    """The parked activations of one route to this rank: HOLD and FETCH take them without waiting; others wait for that.

    Args:
        route, buffer, lane, recorder, peer: as of any inbox.
        parked: what is posted on the lane, and not taken.
    """

    def __init__(
        self, route: Route, buffer: MessageBuffer, lane: Receiver, recorder: Recorder, peer: int, parked: ParkedLane
    ) -> None:
        super().__init__(route, buffer, lane, recorder, peer)
        self._parked = parked

    def post(self, first: int) -> Iterator[Wait] | None:
        """Post a RECV; waits first while as many as the window have been posted and their messages not taken."""
        waits = self._parked.make_room()
        if waits is not None:
            return self._post_after(waits, first)
        self._post(first)
        return None

    def _post_after(self, waits: Iterator[Wait], first: int) -> Iterator[Wait]:
        yield from waits
        self._post(first)

    def _post(self, first: int) -> None:
        super().post(first)
        self._parked.add(self._posted[first])

    def take(self, first: int, batch: int, what: object, use: Callable[[], None]) -> None:
        """Take a posted message, now or at the first look after it has come.

        Args:
            first, batch: as of `collect`.
            what: the action that takes it, for messages.
            use: what becomes of it as soon as it lies ready.

        Raises:
            TransportError: the lane broke, or another message came.
        """
        self._parked.take(self._posted[first], _Taking(self, first, batch, what, use))

    def hand_over(self, taking: _Taking) -> None:
        """Hand over a message that has come."""
        super().collect(taking.first, taking.batch, taking.what)
        taking.use()

    def settle(self) -> None:
        """Take what has come on the lane since."""
        self._parked.settle()

    def arrived(self, first: int) -> bool:
        """Return whether a message is there, or has been taken (or has failed)."""
        return first not in self._posted or super().arrived(first)

    def wait(self, first: int, what: object) -> Iterator[Wait]:
        """Wait until a message is there, unless it has been taken.

        Raises:
            TransportError: the lane broke.
        """
        if first in self._posted:
            yield from super().wait(first, what)

    def collect(self, first: int, batch: int, what: object) -> None:  # noqa: ARG002
        """See to it that a message that has arrived is taken."""
        self._parked.settle()
