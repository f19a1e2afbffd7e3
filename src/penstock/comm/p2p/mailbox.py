"""The messages of one rank: what is posted, what is on its way out, what waits to be sent or used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from penstock.comm.core.recorder import Recorder
from penstock.comm.core.ticket import Ticket
from penstock.comm.core.wait import Wait, wait_for
from penstock.comm.p2p.message import Parcel
from penstock.comm.p2p.transport import Transport
from penstock.errors import TransportError
from penstock.schedule.ir.schedule import Payload, Stage
from penstock.schedule.machine.instructions import LaneKey, Lowered, Message
from penstock.schedule.proof.in_flight import Piece
from penstock.timeline import Interval, Waiting


class _Sending(NamedTuple):
    """A posted SEND."""

    ticket: Ticket
    nbytes: int
    stage: str
    label: str
    first: int


class Mailbox:
    """Of one rank, for one span.

    Args:
        rank: in its pipeline.
        lowered: the schedule with its messages.
        transport: moves them.
        recorder: takes down how long they take, and their bytes.
    """

    def __init__(self, rank: int, lowered: Lowered, transport: Transport, recorder: Recorder) -> None:
        self._rank, self._lowered, self._transport, self._recorder = rank, lowered, transport, recorder
        self._lanes = [route.lane for route in lowered.routes]
        self._posted: dict[Message, Ticket] = {}
        self._sending: dict[LaneKey, deque[_Sending]] = {}
        self._desk: dict[tuple[Payload, Stage, Stage, Piece], Parcel] = {}

    def receive(self, message: Message) -> None:
        """Post a RECV."""
        ticket = self._posted[message] = self._transport.receive(self._lanes[message.route])
        self._recorder.change("messages", ticket.nbytes)

    def collect(self, message: Message, batch: int, what: str) -> Iterator[Wait]:
        """Wait for a message and lay it ready.

        Args:
            message: posted before.
            batch: to which it must belong, counted from the start of training.
            what: who needs it, for messages.

        Raises:
            TransportError: the lane broke, or another message came.
        """
        route, ticket = self._lowered.routes[message.route], self._posted.pop(message)
        peer = self._peer(route.source.rank)
        cause = f"rank {peer}: {route.payload} {message.first}"
        yield from wait_for(self._recorder, ticket, what, cause, Waiting.MESSAGE, peer)
        assert isinstance(ticket.result, Parcel)
        parcel, ticket.result = ticket.result, None  # who waits for the ticket keeps it longer than the parcel lives
        self._recorder.change("messages", -ticket.nbytes)
        if parcel.on_use is not None:
            parcel.on_use()
        header, piece = parcel.header, route.slice[0] if route.slice else 0
        if (header.batch, header.first, header.piece) != (batch, message.first, piece):
            raise TransportError(
                f"{what}: expected the {route.payload} of microbatch {_named(message.first, piece)} (batch {batch}) "
                f"from rank {route.source.rank}, got that of microbatch {_named(header.first, header.piece)} (batch "
                f"{header.batch})"
            )
        for k, each in enumerate(_opened(parcel, route.count), message.first):
            self._desk[route.payload, route.source, route.target, (k, piece)] = each

    def put(self, payload: Payload, source: Stage, target: Stage, parcel: Parcel) -> None:
        """Lay ready what a SEND will take, or another stage of this rank."""
        self._desk[payload, source, target, (parcel.header.first, parcel.header.piece)] = parcel
        if source.rank == target.rank:
            self._recorder.change("messages", parcel.nbytes)

    def has(self, payload: Payload, source: Stage, target: Stage, key: Piece) -> bool:
        """Whether there is something to take."""
        return (payload, source, target, key) in self._desk

    def take(self, payload: Payload, source: Stage, target: Stage, key: Piece) -> Parcel:
        """Take what has been collected, or put by another stage of this rank."""
        parcel = self._desk.pop((payload, source, target, key))
        if source.rank == target.rank:
            self._recorder.change("messages", -parcel.nbytes)
        return parcel

    def send(self, message: Message) -> Iterator[Wait]:
        """Post a SEND; waits while too many are outstanding on its lane."""
        route = self._lowered.routes[message.route]
        queue = self._sending.setdefault(route.lane, deque())
        while queue and (queue[0].ticket.done or len(queue) >= self._lowered.window):
            yield from self._complete(route.lane, queue)
        piece, numbers = route.slice[0] if route.slice else 0, range(message.first, message.first + route.count)
        parcel = _closed([self._desk.pop((route.payload, route.source, route.target, (k, piece))) for k in numbers])
        nbytes = parcel.nbytes
        recorder, label, start = self._recorder, f"{route.payload} {message.first}", self._recorder.now()
        recorder.change("messages", nbytes)
        ticket = self._transport.send(route.lane, parcel)
        queue.append(_Sending(ticket, nbytes, route.source.name, label, message.first))
        recorder.add(Interval(recorder.rank, "compute", start, recorder.now(), Waiting.POST, f"send {label}"))

    def flush(self) -> Iterator[Wait]:
        """Wait until everything sent is on its way."""
        for lane, queue in self._sending.items():
            while queue:
                yield from self._complete(lane, queue)

    def _complete(self, lane: LaneKey, queue: deque[_Sending]) -> Iterator[Wait]:
        ticket, nbytes, stage, label, first = queue[0]
        recorder, peer = self._recorder, self._peer(lane.target)
        what, cause = f"rank {recorder.rank}, stage {stage}, sending {label}", f"rank {peer}: to take {label}"
        yield from wait_for(recorder, ticket, what, cause, Waiting.ROOM, peer)
        queue.popleft()
        recorder.change("messages", -nbytes)
        start, end = recorder.at(ticket.made_at), recorder.at(ticket.done_at)
        name = f"{lane.payload} {recorder.rank}>{peer}"
        recorder.add(
            Interval(recorder.rank, name, start, end, "SEND", label, microbatch=first, span=recorder.span, peer=peer)
        )

    def _peer(self, rank: int) -> int:
        """The number of a rank of this pipeline among those of all pipelines, as the recorder counts them."""
        return self._recorder.rank - self._rank + rank


def _closed(parcels: list[Parcel]) -> Parcel:
    """One parcel of those of the microbatches of a unit; that of its last one knows most of the batch."""
    if len(parcels) == 1:
        return parcels[0]
    wants = tuple(want for parcel in parcels for want in parcel.wants_gradient)
    return Parcel(parcels[-1].header._replace(first=parcels[0].header.first), [p.tree for p in parcels], wants)


def _opened(parcel: Parcel, count: int) -> list[Parcel]:
    """The parcels of the microbatches of a unit."""
    if count == 1:
        return [parcel]
    share = len(parcel.wants_gradient) // count
    return [
        Parcel(parcel.header._replace(first=parcel.header.first + i), tree, parcel.wants_gradient[i * share :][:share])
        for i, tree in enumerate(parcel.tree)
    ]


def _named(first: int, piece: int) -> str:
    return f"{first}, slice {piece}" if piece else str(first)
