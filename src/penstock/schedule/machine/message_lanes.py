"""Messages on their lanes while a schedule is played: SENDs meet RECVs, arrive after a time, and are consumed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import Lowered, Message, Route
from penstock.schedule.machine.lane_state import LaneState

Carrier = Callable[[Route, float, Callable[[float], None]], bool]
"""Takes a message to a link, as (route, when both ends are posted, what to call when it has been transferred); False
where it occupies none, and so takes a time that is known."""

Latency = float | tuple[float, ...]
"""Of all messages; or of the link of each pair of neighbouring ranks, from that of ranks 0 and 1 on."""


def latency_between(latency: Latency, one: int, other: int) -> float:
    """Return the latency of messages between two ranks.

    Where links differ, that is the longest of those from one to the other: so it is in levels of devices, where a
    message takes the link of the innermost level that holds both.

    Raises:
        ConfigError: there are fewer links than that.
    """
    if not isinstance(latency, tuple):
        return latency
    low, high = min(one, other), max(one, other)
    if high > len(latency):
        raise ConfigError(
            f"latency: a message goes to or from rank {high}, but latencies of {len(latency)} links are given; give "
            "one number, or one for each pair of neighbouring ranks"
        )
    return max(latency[low:high], default=0.0)


MessageObserver = Callable[[Route, int, float, float], None]
"""Called as (route, first microbatch of the span, time at which the SEND is posted, time of arrival)."""


class MessageLanes:
    """The messages of all ranks that are under way, or have arrived and are not consumed yet.

    Args:
        lowered: the schedule with its messages.
        clock: when each rank is free; it moves on where a rank waits for room.
        latency: time from the moment both ends of a message are posted, and the message before it on its lane has been
            transferred, to its arrival; without its transfer. One for all links, or one for each (`latency_between`).
        transfer: time that a message occupies its lane.
        on_message: called for each message that arrives.

    Attributes:
        arrived: per rank, the messages that have arrived and are not consumed yet, with the times.
        held_up: whether a SEND or RECV has waited for room, or a message on its way for its RECV.
        carrier: of messages that share links; None where each lane has one of its own.
    """

    def __init__(
        self,
        lowered: Lowered,
        clock: list[float],
        latency: Latency,
        transfer: float,
        on_message: MessageObserver | None,
    ) -> None:
        self._routes, self._clock = lowered.routes, clock
        self._transfer, self._on_message = transfer, on_message
        self._latencies = [latency_between(latency, r.source.rank, r.target.rank) for r in lowered.routes]
        lane_index = {lane: i for i, lane in enumerate(lowered.lanes)}
        self._lane_of_route = [lane_index[route.lane] for route in lowered.routes]
        self._lanes = [LaneState(lowered.window, lane.payload is Payload.PARKED) for lane in lowered.lanes]
        self.arrived: list[dict[Message, float]] = [{} for _ in clock]
        self.held_up = False
        self.carrier: Carrier | None = None

    def send(self, rank: int, message: Message, woken: set[int]) -> bool:
        """Post a SEND, or return False while the lane's window is full; adds the ranks whose message arrives."""
        lane = self._lanes[self._lane_of_route[message.route]]
        room = lane.room_to_send()
        if room is None:
            return False
        post = self._clock[rank]
        if room > post:
            post = self._wait_until(rank, room)
        lane.sent += 1
        if lane.recvs:
            wanted, ready = lane.recvs.popleft()
            self._match(lane, message, post, wanted, ready, woken)
        else:
            lane.sends.append((message, post))
        return True

    def receive(self, rank: int, message: Message, woken: set[int]) -> bool:
        """Post a RECV, or return False while all buffers of its lane wait for what has not come yet."""
        lane = self._lanes[self._lane_of_route[message.route]]
        if lane.parks:
            room = lane.room_to_receive()
            if room is None:
                return False
            self._wait_until(rank, room)
            lane.posts_receive()
        if lane.sends:
            sent, posted = lane.sends.popleft()
            self._match(lane, sent, posted, message, self._clock[rank], woken)
        else:
            lane.recvs.append((message, self._clock[rank]))
        return True

    def consume(self, rank: int, needs: tuple[Message, ...], offset: int) -> float | None:
        """Consume the messages an action needs: when the last of them arrived, or None if one has not."""
        arrived = self.arrived[rank]
        keys = [Message(route, first + offset) for route, first in needs] if offset else needs
        if len(keys) == 1:
            return arrived.pop(keys[0], None)
        latest = 0.0
        for key in keys:
            time = arrived.get(key)
            if time is None:
                return None
            latest = max(latest, time)
        for key in keys:
            del arrived[key]
        return latest

    def accept(self, rank: int, needs: tuple[Message, ...], offset: int) -> None:
        """Take messages now, or as soon as they come; meanwhile the rank goes on."""
        for route, first in needs:
            message = Message(route, first + offset)
            self._lanes[self._lane_of_route[route]].take(message, self.arrived[rank].get(message))

    def _wait_until(self, rank: int, room: float) -> float:
        """Let a rank wait for room on a lane, which was or will be there at a time; return when it goes on."""
        if room > self._clock[rank]:
            self._clock[rank] = room
            self.held_up = True
        return self._clock[rank]

    def _match(
        self, lane: LaneState, sent: Message, posted: float, wanted: Message, ready: float, woken: set[int]
    ) -> None:
        """A SEND has met its RECV: the message arrives and the sender's buffer is free again."""
        route = self._routes[wanted.route]
        if sent != wanted:
            raise ScheduleError(
                f"on {route.lane}, microbatch {sent.first} is sent where microbatch {wanted.first} is expected: both "
                "ends must use one order"
            )
        if ready > posted and (
            self._latencies[wanted.route] or self._transfer
        ):  # else it is there when its consumer wants it
            self.held_up = True
        time = max(posted, ready)
        if self.carrier and self.carrier(route, time, partial(self._arrive, lane, route, wanted, posted)):
            return
        if self._transfer:
            time = lane.free = max(time, lane.free) + self._transfer
        self._arrive(lane, route, wanted, posted, time)
        woken.update((route.source.rank, route.target.rank))

    def _arrive(self, lane: LaneState, route: Route, wanted: Message, posted: float, transferred: float) -> None:
        """Let a message arrive that has been transferred; the sender's buffer is free with it."""
        time = transferred + self._latencies[wanted.route]
        lane.completes_send(time)
        self.arrived[route.target.rank][wanted] = time
        if lane.parks:
            lane.arrive(wanted, time)
        if self._on_message is not None:
            self._on_message(route, wanted.first, posted, time)

    def copy(self, clock: list[float]) -> MessageLanes:
        """Return independent lanes in the same state, for ranks with a clock of their own."""
        twin = copy.copy(self)
        twin._clock = clock
        twin._lanes = [lane.copy() for lane in self._lanes]
        twin.arrived = [dict(each) for each in self.arrived]
        return twin

    def state(self, offset: int) -> tuple[object, object]:
        """Return what is under way, and what has arrived, with microbatches counted from `offset`."""

        def relative(messages: Iterable[Message]) -> tuple[Message, ...]:
            return tuple(Message(route, first - offset) for route, first in messages)

        lanes = tuple(lane.state(relative) for lane in self._lanes)
        return lanes, tuple(relative(sorted(each)) for each in self.arrived)

    def times(self) -> list[float]:
        """Return the times of all that `state` tells, in one order."""
        found = [time for lane in self._lanes for time in lane.times()]
        for each in self.arrived:
            found += [each[message] for message in sorted(each)]
        return found
