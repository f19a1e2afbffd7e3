"""The messages of one rank: posted, on their way out, and lying ready to be sent or used.

Everything that does not depend on the microbatch is bound once: a `Desk` for each pair of stages and payload, an
`Inbox` or `Outbox` for each route of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from penstock.comm.core.recorder import Recorder
from penstock.comm.core.ticket import Ticket
from penstock.comm.core.wait import Wait, wait_for
from penstock.comm.p2p.message import TensorMessage
from penstock.comm.p2p.transport import Transport
from penstock.errors import TransportError
from penstock.schedule.ir.schedule import Payload, Stage, Unit, format_unit
from penstock.schedule.machine.instructions import LaneKey, Lowered, Route
from penstock.schedule.proof.in_flight import Piece
from penstock.timeline import Interval, Waiting


class Desk:
    """Contents of messages of one payload from one stage to another that have arrived, or wait to be sent.

    Args:
        recorder: of the bytes that stages of one rank hand to each other; None where the stages lie on two ranks,
            whose bytes are counted with the message.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._contents: dict[Piece, TensorMessage] = {}
        self._recorder = recorder

    def put(self, content: TensorMessage) -> None:
        """Lay a content ready."""
        header = content.header
        self._contents[header.first, header.piece] = content
        if self._recorder is not None:
            self._recorder.change("messages", content.nbytes)

    def take(self, key: Piece) -> TensorMessage:
        """Take the content of a microbatch (slice)."""
        content = self._contents.pop(key)
        if self._recorder is not None:
            self._recorder.change("messages", -content.nbytes)
        return content

    def __contains__(self, key: Piece) -> bool:
        return key in self._contents


class Inbox:
    """The messages of one route to this rank.

    Args:
        route: between which stages.
        desk: where they are laid ready.
        transport: receives them.
        recorder: of their bytes, and of waits.
        peer: the global rank of the sender.
    """

    def __init__(self, route: Route, desk: Desk, transport: Transport, recorder: Recorder, peer: int) -> None:
        self._route, self._desk, self._transport, self._recorder = route, desk, transport, recorder
        self._lane, self._peer = route.lane, peer
        self._piece = route.slice[0] if route.slice else 0
        self._name = route.payload.value  # an enum takes longer to format than a string
        self._posted: dict[int, Ticket] = {}

    def post(self, first: int) -> None:
        """Post the RECV of the message that begins with microbatch `first` of the span."""
        ticket = self._posted[first] = self._transport.receive(self._lane)
        self._recorder.change("messages", ticket.nbytes)

    def arrived(self, first: int) -> bool:
        """Return whether a posted message is there (or has failed)."""
        return self._posted[first].done

    def wait(self, first: int, what: str) -> Iterator[Wait]:
        """Wait until a posted message is there.

        Raises:
            TransportError: the lane broke.
        """
        cause = f"rank {self._peer}: {self._name} {first}"
        yield from wait_for(self._recorder, self._posted[first], what, cause, Waiting.MESSAGE, self._peer)

    def collect(self, first: int, batch: int, what: str) -> None:
        """Lay a message that has arrived ready.

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
        self._recorder.change("messages", -ticket.nbytes)
        if content.on_use is not None:
            content.on_use()
        header = content.header
        if header.batch != batch or header.first != first or header.piece != self._piece:
            raise TransportError(
                f"{what}: expected the {route.payload} of microbatch {_named(first, self._piece)} (batch {batch}) "
                f"from rank {route.source.rank}, got that of microbatch {_named(header.first, header.piece)} (batch "
                f"{header.batch})"
            )
        for each in [content] if route.count == 1 else _opened(content, route.count):
            self._desk.put(each)


class _Sending(NamedTuple):
    """A posted SEND."""

    ticket: Ticket
    nbytes: int
    route: Route
    label: str
    first: int


class OutLane:
    """The posted SENDs of one lane from this rank.

    Args:
        lane: first in, first out.
        window: how many may be outstanding.
        recorder: of how long they take, and their bytes.
        peer: the global rank of the receiver.
    """

    def __init__(self, lane: LaneKey, window: int, recorder: Recorder, peer: int) -> None:
        self.lane, self._window, self._recorder, self._peer = lane, window, recorder, peer
        self._queue: deque[_Sending] = deque()
        self._name = f"{lane.payload} {recorder.rank}>{peer}"

    def add(self, sending: _Sending) -> None:
        """Note a SEND that has been posted."""
        self._queue.append(sending)

    def make_room(self) -> Iterator[Wait] | None:
        """Forget SENDs that have completed; an iterator of waits if there is no room for another one."""
        queue = self._queue
        while queue and queue[0].ticket.done:
            self._complete()
        return self._wait_for_room() if len(queue) >= self._window else None

    def _wait_for_room(self) -> Iterator[Wait]:
        while len(self._queue) >= self._window:
            yield from self._wait()

    def flush(self) -> Iterator[Wait]:
        """Wait until everything posted has been taken."""
        while self._queue:
            yield from self._wait()

    def _wait(self) -> Iterator[Wait]:
        ticket, _, route, label, _ = self._queue[0]
        what, cause = (
            f"rank {self._recorder.rank}, stage {route.source.name}, sending {label}",
            f"rank {self._peer}: to take {label}",
        )
        yield from wait_for(self._recorder, ticket, what, cause, Waiting.ROOM, self._peer)
        self._complete()

    def _complete(self) -> None:
        ticket, nbytes, route, label, first = self._queue.popleft()
        recorder = self._recorder
        if ticket.error is not None:
            ticket.check(f"rank {recorder.rank}, stage {route.source.name}, sending {label}")
        recorder.change("messages", -nbytes)
        start, end = recorder.at(ticket.made_at), recorder.at(ticket.done_at)
        recorder.add(
            Interval(
                recorder.rank,
                self._name,
                start,
                end,
                "SEND",
                label,
                route.target.index,
                route.target.direction,
                microbatch=first,
                span=recorder.span,
                peer=self._peer,
            )
        )


class Outbox:
    """The messages of one route from this rank.

    Args:
        route: between which stages.
        desk: where their contents lie ready.
        transport: sends them.
        lane: on which they travel.
        recorder: of their bytes.
    """

    def __init__(self, route: Route, desk: Desk, transport: Transport, lane: OutLane, recorder: Recorder) -> None:
        self._route, self._desk, self._transport, self._lane, self._recorder = route, desk, transport, lane, recorder
        self._piece = route.slice[0] if route.slice else 0
        self._name = route.payload.value  # an enum takes longer to format than a string
        self._unit = Unit(0, route.count, route.slice) if route.count > 1 or route.slice else None

    def send(self, first: int) -> Iterator[Wait] | None:
        """Post the SEND of the message that begins with microbatch `first`; waits first where its lane is full."""
        waits = self._lane.make_room()
        if waits is not None:
            return self._send_after(waits, first)
        self._send(first)
        return None

    def _send_after(self, waits: Iterator[Wait], first: int) -> Iterator[Wait]:
        yield from waits
        self._send(first)

    def _send(self, first: int) -> None:
        route, recorder = self._route, self._recorder
        contents = [self._desk.take((k, self._piece)) for k in range(first, first + route.count)]
        content = contents[0] if len(contents) == 1 else _closed(contents)
        unit = first if self._unit is None else format_unit(self._unit._replace(first=first))
        nbytes, label, start = content.nbytes, f"{self._name} {unit}", recorder.now()
        recorder.change("messages", nbytes)
        ticket = self._transport.send(self._lane.lane, content)
        self._lane.add(_Sending(ticket, nbytes, route, label, first))
        recorder.add(Interval(recorder.rank, "compute", start, recorder.now(), Waiting.POST, f"send {label}"))


class Mailbox:
    """The desks, inboxes and outboxes of one rank, for one span.

    Args:
        rank: in its pipeline.
        lowered: the schedule with its messages.
        transport: moves them.
        recorder: of how long they take, and their bytes.
    """

    def __init__(self, rank: int, lowered: Lowered, transport: Transport, recorder: Recorder) -> None:
        self._rank, self._lowered, self._transport, self._recorder = rank, lowered, transport, recorder
        self._desks: dict[tuple[Payload, Stage, Stage], Desk] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._lanes: dict[LaneKey, OutLane] = {}

    def desk(self, payload: Payload, source: Stage, target: Stage) -> Desk:
        """The desk for what one stage hands to another."""
        key = payload, source, target
        if key not in self._desks:
            self._desks[key] = Desk(self._recorder if source.rank == target.rank else None)
        return self._desks[key]

    def inbox(self, number: int) -> Inbox:
        """The inbox of a route of the schedule."""
        if number not in self._inboxes:
            route = self._lowered.routes[number]
            desk, peer = self.desk(route.payload, route.source, route.target), self._peer(route.source.rank)
            self._inboxes[number] = Inbox(route, desk, self._transport, self._recorder, peer)
        return self._inboxes[number]

    def outbox(self, number: int) -> Outbox:
        """An outbox for a route of the schedule."""
        route = self._lowered.routes[number]
        lane = route.lane
        if lane not in self._lanes:
            self._lanes[lane] = OutLane(lane, self._lowered.window, self._recorder, self._peer(lane.target))
        desk = self.desk(route.payload, route.source, route.target)
        return Outbox(route, desk, self._transport, self._lanes[lane], self._recorder)

    def flush(self) -> Iterator[Wait]:
        """Wait until everything sent is on its way."""
        for lane in self._lanes.values():
            yield from lane.flush()

    def _peer(self, rank: int) -> int:
        """The global rank of a rank of this pipeline, as the recorder counts them."""
        return self._recorder.rank - self._rank + rank


def _closed(contents: list[TensorMessage]) -> TensorMessage:
    """One content for all microbatches of a unit; the header is the last one's, which knows most of the batch."""
    wants = tuple(want for content in contents for want in content.wants_gradient)
    return TensorMessage(
        contents[-1].header._replace(first=contents[0].header.first), [p.tree for p in contents], wants
    )


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
