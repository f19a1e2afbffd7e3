"""The messages of one route to this rank: posted, arrived, laid ready."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.comm.core.coroutine_wait import Wait, wait_for
from penstock.comm.core.ticket import Ticket
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.message.tensor_message import TensorMessage
from penstock.comm.p2p.messages_by_microbatch import MessageBuffer
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

    def wait(self, first: int, what: object) -> Iterator[Wait]:
        """Wait until a posted message is there.

        Raises:
            TransportError: the lane broke.
        """
        cause = f"rank {self._peer}: {self.name} {first}"
        yield from wait_for(self._recorder, self._posted[first], what, cause, Waiting.MESSAGE, self._peer)

    def collect(self, first: int, batch: int, what: object) -> None:
        """Lay a message that has arrived ready to be used at once.

        Args:
            first: its first microbatch, counted through the span.
            batch: to which it must belong, counted from the start of training.
            what: the action that needs it, for messages.

        Raises:
            TransportError: the lane broke, or another message came.
        """
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
        if route.count == 1:
            self._buffer.put(content)
        else:
            for each in _opened(content, route.count):
                self._buffer.put(each)
        if content.on_use is not None:
            content.on_use()


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
