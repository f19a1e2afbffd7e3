"""The mailbox of a rank: the messages of every route to it and from it, and activations parked with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.comm.core.ticket import Ticket, Wait, wait_for
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.comm.p2p.transport import Receiver, Sender, Transport
from penstock.errors import TransportError
from penstock.schedule.ir.schedule import Payload, Stage, Unit, format_unit
from penstock.schedule.machine.instructions import LaneKey, Lowered, Route
from penstock.schedule.stage_state.microbatch_state import Piece
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


class MessageBuffer:
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


# The messages of one rank: its buffers and inboxes, and what it sends.
#
# Everything that does not depend on the microbatch is bound once: a `MessageBuffer` for each pair of stages and
# payload, an `Inbox` or `Outbox` for each route of the schedule.


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
        lane: its sending end.
        payload: what travels on it.
        window: how many may be outstanding.
        recorder: of how long they take, and their bytes.
        peer: the global rank of the receiver.
    """

    def __init__(self, lane: Sender, payload: Payload, window: int, recorder: Recorder, peer: int) -> None:
        self.lane, self._window, self._recorder, self._peer = lane, window, recorder, peer
        self.queue: deque[_Sending] = deque()
        self._name = f"{payload} {recorder.rank}>{peer}"

    def make_room(self) -> Iterator[Wait] | None:
        """Forget SENDs that have completed; an iterator of waits if there is no room for another one."""
        queue, recorder = self.queue, self._recorder
        while queue and queue[0].ticket.done:
            ticket, nbytes, route, label, first = queue.popleft()
            if ticket.error is not None:
                ticket.check(f"rank {recorder.rank}, stage {route.source.name}, sending {label}")
            recorder.change("messages", -nbytes)
            start, end, target = ticket.made_at, ticket.done_at, route.target
            place = target.index, target.direction
            recorder.add(self._name, start, end, "SEND", label, *place, microbatch=first, peer=self._peer)
        return self._wait_for_room() if len(queue) >= self._window else None

    def _wait_for_room(self) -> Iterator[Wait]:
        while len(self.queue) >= self._window:
            yield from self._wait()

    def flush(self) -> Iterator[Wait]:
        """Wait until everything posted has been taken."""
        while self.queue:
            yield from self._wait()

    def _wait(self) -> Iterator[Wait]:
        ticket, _, route, label, _ = self.queue[0]
        what, cause = (
            f"rank {self._recorder.rank}, stage {route.source.name}, sending {label}",
            f"rank {self._peer}: to take {label}",
        )
        yield from wait_for(self._recorder, ticket, what, cause, Waiting.ROOM, self._peer)
        self.make_room()


class Outbox:
    """The messages of one route from this rank.

    Args:
        route: between which stages.
        buffer: where their contents lie ready.
        lane: on which they travel.
        recorder: of their bytes.
    """

    def __init__(self, route: Route, buffer: MessageBuffer, lane: OutLane, recorder: Recorder) -> None:
        self._route, self._buffer, self._lane, self._recorder = route, buffer, lane, recorder
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
        if route.count == 1:
            content = self._buffer.take((first, self._piece))
        else:
            content = _closed([self._buffer.take((k, self._piece)) for k in range(first, first + route.count)])
        unit = first if self._unit is None else format_unit(self._unit._replace(first=first))
        nbytes, label, start = content.nbytes, f"{self._name} {unit}", recorder.now()
        recorder.change("messages", nbytes)
        self._lane.queue.append(_Sending(self._lane.lane.send(content), nbytes, route, label, first))
        recorder.add("compute", start, recorder.now(), Waiting.POST, f"send {label}")


class Mailbox:
    """The buffers, inboxes and outboxes of one rank, for one span.

    Args:
        ranks: the number of each rank of the pipeline, as the recorder counts them.
        lowered: the schedule with its messages.
        transport: moves them.
        recorder: of how long they take, and their bytes.
    """

    def __init__(self, ranks: Sequence[int], lowered: Lowered, transport: Transport, recorder: Recorder) -> None:
        self._ranks, self._lowered, self._transport, self._recorder = ranks, lowered, transport, recorder
        self._buffers: dict[tuple[Payload, Stage, Stage], MessageBuffer] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._parked: dict[int, ParkedInbox] = {}
        self._parked_lanes: dict[LaneKey, ParkedLane] = {}
        self._lanes: dict[LaneKey, OutLane] = {}

    def buffer(self, payload: Payload, source: Stage, target: Stage) -> MessageBuffer:
        """The buffer for what one stage hands to another."""
        key = payload, source, target
        if key not in self._buffers:
            self._buffers[key] = MessageBuffer(self._recorder if source.rank == target.rank else None)
        return self._buffers[key]

    def inbox(self, number: int) -> Inbox:
        """The inbox of a route of the schedule."""
        route = self._lowered.routes[number]
        if route.payload is Payload.PARKED:
            return self.parked(number)
        if number not in self._inboxes:
            buffer, peer = self.buffer(route.payload, route.source, route.target), self._ranks[route.source.rank]
            self._inboxes[number] = Inbox(route, buffer, self._transport.receiver(route.lane), self._recorder, peer)
        return self._inboxes[number]

    def parked(self, number: int) -> ParkedInbox:
        """The inbox of a route of parked activations."""
        if number not in self._parked:
            route = self._lowered.routes[number]
            buffer, peer = self.buffer(route.payload, route.source, route.target), self._ranks[route.source.rank]
            lane = self._parked_lanes.setdefault(route.lane, ParkedLane(self._lowered.window, self._recorder))
            end = self._transport.receiver(route.lane)
            self._parked[number] = ParkedInbox(route, buffer, end, self._recorder, peer, lane)
        return self._parked[number]

    def outbox(self, number: int) -> Outbox:
        """An outbox for a route of the schedule."""
        route = self._lowered.routes[number]
        lane = route.lane
        if lane not in self._lanes:
            peer, end = self._ranks[lane.target], self._transport.sender(lane)
            self._lanes[lane] = OutLane(end, lane.payload, self._lowered.window, self._recorder, peer)
        buffer = self.buffer(route.payload, route.source, route.target)
        return Outbox(route, buffer, self._lanes[lane], self._recorder)

    def flush(self) -> Iterator[Wait]:
        """Wait until everything sent is on its way."""
        for lane in self._lanes.values():
            yield from lane.flush()


def _closed(contents: list[TensorMessage]) -> TensorMessage:
    """One content for all microbatches of a unit; the header is the last one's, which knows most of the batch."""
    wants = tuple(want for content in contents for want in content.wants_gradient)
    return TensorMessage(
        contents[-1].header._replace(first=contents[0].header.first), [p.tree for p in contents], wants
    )
