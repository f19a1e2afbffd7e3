"""The messages of one rank: its buffers and inboxes, and what it sends.

Everything that does not depend on the microbatch is bound once: a `MessageBuffer` for each pair of stages and payload,
an `Inbox` or `Outbox` for each route of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.comm.core.coroutine_wait import Wait, wait_for
from penstock.comm.core.ticket import Ticket
from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.message.tensor_message import TensorMessage
from penstock.comm.p2p.inbox import Inbox
from penstock.comm.p2p.messages_by_microbatch import MessageBuffer
from penstock.comm.p2p.parked_activations_inbox import ParkedInbox, ParkedLane
from penstock.comm.p2p.transport import Sender, Transport
from penstock.schedule.ir.schedule import Payload, Stage, Unit, format_unit
from penstock.schedule.machine.instructions import LaneKey, Lowered, Route
from penstock.timeline import Waiting


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
