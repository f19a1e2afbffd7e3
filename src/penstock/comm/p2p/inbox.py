"""The messages to one rank: posted, arrived, laid ready; parked activations are taken as soon as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.comm.core.recorder import Recorder
from penstock.comm.core.ticket import Ticket
from penstock.comm.core.wait import Wait, wait_for
from penstock.comm.p2p.message import TensorMessage
from penstock.comm.p2p.message_buffer import MessageBuffer
from penstock.comm.p2p.transport import Receiver
from penstock.errors import TransportError
from penstock.schedule.machine.instructions import Route
from penstock.timeline import Waiting


class Inbox:
    """The messages of one route to this rank.

    Args:
        route: between which stages.
        buffer: where they are laid ready.
        lane: on which they travel.
        recorder: of their bytes, and of waits.
        peer: the global rank of the sender.

    Attributes:
        name: what is in them.
    """

    def __init__(self, route: Route, buffer: MessageBuffer, lane: Receiver, recorder: Recorder, peer: int) -> None:
        self._route, self._buffer, self._lane, self._recorder, self._peer = route, buffer, lane, recorder, peer
        self._piece = route.slice[0] if route.slice else 0
        self.name = route.payload.value  # an enum takes longer to format than a string
        self._posted: dict[int, Ticket] = {}

    def post(self, first: int) -> Iterator[Wait] | None:
        """Post the RECV of the message that begins with microbatch `first` of the span."""
        ticket = self._posted[first] = self._lane.receive()
        if ticket.nbytes:
            self._recorder.change("messages", ticket.nbytes)
        return None

    def arrived(self, first: int) -> bool:
        """Return whether a posted message is there (or has failed)."""
        return self._posted[first].done

    def wait(self, first: int, what: str) -> Iterator[Wait]:
        """Wait until a posted message is there.

        Raises:
            TransportError: the lane broke.
        """
        cause = f"rank {self._peer}: {self.name} {first}"
        yield from wait_for(self._recorder, self._posted[first], what, cause, Waiting.MESSAGE, self._peer)

    def collect(self, first: int, batch: int, what: str) -> None:
        """Lay a message that has arrived ready to be used at once.

        Args:
            first: its first microbatch, counted through the span.
            batch: to which it must belong, counted from the start of training.
            what: the action that needs it, for messages.

        Raises:
            TransportError: the lane broke, or another message came.
        """
        content = self._lay_ready(first, batch, what)
        if content.on_use is not None:
            content.on_use()

    def _lay_ready(self, first: int, batch: int, what: str) -> TensorMessage:
        ticket, route = self._posted.pop(first), self._route
        if ticket.error is not None:
            ticket.check(what)
        content, ticket.result = ticket.result, None  # the ticket may be kept longer than the content lives
        assert isinstance(content, TensorMessage)
        if ticket.nbytes:
            self._recorder.change("messages", -ticket.nbytes)
        header = content.header
        if header.batch != batch or header.first != first or header.piece != self._piece:
            raise TransportError(
                f"{what}: expected the {route.payload} of microbatch {_named(first, self._piece)} (batch {batch}) "
                f"from rank {route.source.rank}, got that of microbatch {_named(header.first, header.piece)} (batch "
                f"{header.batch})"
            )
        for each in [content] if route.count == 1 else _opened(content, route.count):
            self._buffer.put(each)
        return content


class _Taking(NamedTuple):
    """Parked activations that are on their way, and what becomes of them."""

    inbox: ParkedInbox
    first: int
    batch: int
    what: str
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
        """Take what a RECV was posted for, now or as soon as it comes."""
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

    def take(self, first: int, batch: int, what: str, use: Callable[[], None]) -> None:
        """Take a posted message, now or as soon as it comes.

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
        self._lay_ready(taking.first, taking.batch, taking.what)
        taking.use()

    def settle(self) -> None:
        """Take what has come on the lane since."""
        self._parked.settle()

    def arrived(self, first: int) -> bool:
        """Return whether a message is there, or has been taken (or has failed)."""
        return first not in self._posted or super().arrived(first)

    def wait(self, first: int, what: str) -> Iterator[Wait]:
        """Wait until a message is there, unless it has been taken.

        Raises:
            TransportError: the lane broke.
        """
        if first in self._posted:
            yield from super().wait(first, what)

    def collect(self, first: int, batch: int, what: str) -> None:  # noqa: ARG002
        """See to it that a message that has arrived is taken."""
        self._parked.settle()


def _opened(content: TensorMessage, count: int) -> list[TensorMessage]:
    """The contents of the microbatches of a unit."""
    share = len(content.wants_gradient) // count
    return [
        TensorMessage(
            content.header._replace(first=content.header.first + i), tree, content.wants_gradient[i * share :][:share]
        )
        for i, tree in enumerate(content.tree)
    ]


def _named(first: int, piece: int) -> str:
    return f"{first}, slice {piece}" if piece else str(first)
