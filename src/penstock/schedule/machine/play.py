"""Plays lowered programs on the machine model: who runs when, who waits for whom.

One small interpreter serves the proof (every duration zero: does anything wait for ever?) and the simulator (durations
from costs: when does everything start and end?). Its rules are those of `penstock.schedule.machine.instructions`. The
play is deterministic: each rank runs in order and each lane is first in, first out, so the order in which the
interpreter visits the ranks changes nothing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import DeadlockError, ScheduleError
from penstock.schedule.ir.absolute_actions import existing
from penstock.schedule.ir.op_table import ACCEPTING
from penstock.schedule.ir.schedule import Action, Kind, Op, Payload, format_unit, passes
from penstock.schedule.machine.collective_state import ADDING, Collectives, is_collective
from penstock.schedule.machine.instructions import Instruction, Lowered, LoweredProgram, Message, Route
from penstock.schedule.machine.lane_state import HostCopies, LaneState, is_host_copy

Observer = Callable[[int, Action, int, float, float], None]
"""Called as (rank, action with relative numbers, batch they are relative to, start, end)."""

MessageObserver = Callable[[Route, int, float, float], None]
"""Called as (route, first microbatch of the span, time at which the SEND is posted, time of arrival)."""


@dataclass
class _Segment:
    """A part of a rank's program that is being played."""

    instructions: Sequence[Instruction]
    t: int
    place: int = 0


class Blocked(NamedTuple):
    """What a rank waits for when nothing moves any more."""

    rank: int
    action: Action
    reason: str


def _instant(_action: Action) -> float:
    return 0.0


class Machine:
    """Plays the programs of all ranks, each with a clock of its own.

    Args:
        lowered: the schedule with its messages.
        duration: time an action occupies its lane; zero everywhere for a proof.
        latency: time from the moment both ends of a message are posted, and the message before it on its lane has been
            transferred, to its arrival; without its transfer.
        observer: called for each action that is not a message.
        on_message: called for each message that arrives.
        transfer: time that a message occupies its lane.

    Attributes:
        copies_beside: whether activations are copied to the host's memory, beside the passes.
    """

    def __init__(
        self,
        lowered: Lowered,
        duration: Callable[[Action], float] = _instant,
        latency: float = 0.0,
        observer: Observer | None = None,
        on_message: MessageObserver | None = None,
        transfer: float = 0.0,
    ) -> None:
        self.lowered, self.latency, self.observer, self._on_message = lowered, latency, observer, on_message
        self._transfer = transfer
        self._proves = observer is None and duration is _instant
        self._m = lowered.schedule.microbatches
        lane_index = {lane: i for i, lane in enumerate(lowered.lanes)}
        self._lane_of_route = [lane_index[route.lane] for route in lowered.routes]
        # Per rank: what is posted before the first period, a period that another one follows, the last, the epilogue;
        # and the periods in which a version is rejected.
        self._codes = [self._variants(program) for program in lowered.programs]
        self._collects = any(is_collective(i.action) for program in lowered.programs for i in program.period)
        self.copies_beside = not self._proves and any(  # which block nobody
            is_host_copy(i.action) for program in lowered.programs for part in program for i in part
        )
        self._duration = duration
        ranks = lowered.schedule.ranks
        self.clock = [0.0] * ranks
        self.held_up = False  # whether a SEND or RECV has waited for room, or a message on its way for its RECV
        self._queues: list[deque[_Segment]] = [deque() for _ in range(ranks)]
        self._lanes = [LaneState(lowered.window, lane.payload is Payload.PARKED) for lane in lowered.lanes]
        self._arrived: list[dict[Message, float]] = [{} for _ in range(ranks)]
        self._collectives = Collectives(lowered.schedule, duration)
        self._host_copies = HostCopies(ranks)

    def _variants(self, program: LoweredProgram) -> tuple[Sequence[Instruction], ...]:
        parts: list[Sequence[Instruction]] = list(program)
        if self._proves:  # passes that wait for nobody take no part
            limited = self.lowered.schedule.sharding.gradients is not None
            parts = [[i for i in part if _interacts(i) or (limited and _adds(i))] for part in program]
        period, epilogue, rejected = parts
        return (
            [i for i in period if i.ahead],
            period,
            _last(period),
            epilogue,
            rejected or period,
            _last(rejected or period),
        )

    # --- playing ----------------------------------------------------------------------------------------------------

    def play(self, batches: int, rejected: Collection[int] = ()) -> None:
        """Play a whole span.

        Args:
            batches: its length.
            rejected: batches whose update is made again.

        Raises:
            ScheduleError: some ranks wait for ever.
        """
        for t in range(-1, batches):
            self.play_period(t, t + 1 < batches, t - 1 in rejected)
        self.play_epilogue(batches)

    def play_period(self, t: int, more: bool, rejected: bool = False) -> None:
        """Play the period of batch t on every rank.

        Args:
            t: the batch.
            more: whether the span continues after it.
            rejected: whether the version that its VALIDATEs decide on is rejected.

        A rank that has to wait for something of the next period keeps the rest of this one.
        """
        which = 0 if t < 0 else (1 if more else 2) + 3 * (rejected and t > 0)
        if more or t >= 0:
            self._run([codes[which] for codes in self._codes], t)

    def play_epilogue(self, batches: int) -> None:
        """Play the epilogue of a span of `batches` batches on every rank.

        Raises:
            ScheduleError: some ranks wait for ever.
        """
        self._run([codes[3] for codes in self._codes], batches)
        stuck = [self._why(rank, queue[0]) for rank, queue in enumerate(self._queues) if queue]
        if stuck:
            raise DeadlockError(_waits(stuck))

    def _run(self, parts: list[Sequence[Instruction]], t: int) -> None:
        """Append a part to every rank's queue and advance the ranks as far as they go."""
        for queue, part in zip(self._queues, parts, strict=True):
            queue.append(_Segment(part, t))
        waiting: set[int] = set()
        runnable = deque(range(len(self._queues)))
        woken: set[int] = set()
        while runnable:
            rank = runnable.popleft()
            woken.clear()
            self._advance(rank, woken)
            if self._queues[rank]:
                waiting.add(rank)
            for other in woken:
                if other in waiting and other != rank:
                    waiting.discard(other)
                    runnable.append(other)

    def _advance(self, rank: int, woken: set[int]) -> None:
        """Run one rank until it has to wait or its queue is empty."""
        queue, arrived, clock = self._queues[rank], self._arrived[rank], self.clock
        duration, observer, beside = self._duration, self.observer, self._collects or self.copies_beside
        while queue:
            segment = queue[0]
            instructions, t, offset = segment.instructions, segment.t, segment.t * self._m
            for place in range(segment.place, len(instructions)):
                action, route, needs, _, awaits = instructions[place]
                op, unit = action[0], action[2]
                first = unit[0] + offset
                if route >= 0:
                    if first < 0:
                        continue
                    if not (self._receive if op is Op.RECV else self._send)(rank, Message(route, first), woken):
                        break
                    continue
                parts = action[4]
                if unit[3] is Kind.BATCH:
                    first = unit[0] + t
                    if unit[4] > 1 and (first + 1) % unit[4]:
                        continue
                if parts:
                    found = existing(action, t, self._m)
                    if found is None:
                        continue
                    if found is not action:
                        action = found
                        needs = tuple([k for k in needs if k.first + offset >= 0])
                        awaits = tuple([k for k in awaits if k.first + offset >= 0])
                elif first < 0:
                    continue
                if beside:
                    if self._issued_beside(rank, action, t, first, woken):
                        continue
                    if not self._collectives.joined(action, first, t):
                        break
                start = clock[rank]
                if needs and op in ACCEPTING:
                    self._accept(rank, needs, offset)
                    needs = ()
                if awaits:
                    needs += awaits
                if needs:
                    ready = self._take(arrived, needs, offset)
                    if ready is None:
                        break
                    start = max(start, ready)
                if beside:
                    start = max(start, self._collectives.done(action, first, t), self._host_copies.done(action, offset))
                end = clock[rank] = start + duration(action)
                if observer is not None:
                    observer(rank, action, t, start, end)
            else:
                queue.popleft()
                continue
            segment.place = place
            return

    def _issue(self, rank: int, action: Action, t: int, batch: int, woken: set[int]) -> None:
        """Issue a collective, which blocks nobody; if it was the last member's, it has its time now."""
        for op, stage, start, end in self._collectives.issue(rank, action, batch, self.clock[rank]):
            woken.add(stage.rank)
            if self.observer is not None:
                self.observer(stage.rank, action._replace(op=op, stage=stage), t, start, end)

    def _issued_beside(self, rank: int, action: Action, t: int, batch: int, woken: set[int]) -> bool:
        """Issue a collective, or a copy to the host's memory or back, which blocks nobody; False for other actions."""
        if is_collective(action):
            self._issue(rank, action, t, batch, woken)
            return True
        if not (self.copies_beside and is_host_copy(action)):
            return False
        start, end = self._host_copies.issue(rank, action, t * self._m, self.clock[rank], self._duration(action))
        if self.observer is not None:
            self.observer(rank, action, t, start, end)
        return True

    @staticmethod
    def _take(arrived: dict[Message, float], needs: tuple[Message, ...], offset: int) -> float | None:
        """Consume the messages an action needs: when the last of them arrived, or None if one has not."""
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

    def _send(self, rank: int, message: Message, woken: set[int]) -> bool:
        """Post a SEND, or return False while the lane's window is full."""
        lane = self._lanes[self._lane_of_route[message.route]]
        room = lane.room_to_send()
        if room is None:
            return False
        post = self.clock[rank]
        if room > post:
            post = self._wait_until(rank, room)
        lane.sent += 1
        if lane.recvs:
            wanted, ready = lane.recvs.popleft()
            self._match(lane, message, post, wanted, ready, woken)
        else:
            lane.sends.append((message, post))
        return True

    def _receive(self, rank: int, message: Message, woken: set[int]) -> bool:
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
            self._match(lane, sent, posted, message, self.clock[rank], woken)
        else:
            lane.recvs.append((message, self.clock[rank]))
        return True

    def _accept(self, rank: int, needs: tuple[Message, ...], offset: int) -> None:
        """Take messages now, or as soon as they come; meanwhile the rank goes on."""
        for route, first in needs:
            message = Message(route, first + offset)
            self._lanes[self._lane_of_route[route]].take(message, self._arrived[rank].get(message))

    def _wait_until(self, rank: int, room: float) -> float:
        """Let a rank wait for room on a lane, which was or will be there at a time; return when it goes on."""
        if room > self.clock[rank]:
            self.clock[rank] = room
            self.held_up = True
        return self.clock[rank]

    def _match(
        self, lane: LaneState, sent: Message, posted: float, wanted: Message, ready: float, woken: set[int]
    ) -> None:
        """A SEND has met its RECV: the message arrives and the sender's buffer is free again."""
        route = self.lowered.routes[wanted.route]
        if sent != wanted:
            raise ScheduleError(
                f"on {route.lane}, microbatch {sent.first} is sent where microbatch {wanted.first} is expected: both "
                "ends must use one order"
            )
        if ready > posted and (self.latency or self._transfer):  # else it is there when its consumer wants it
            self.held_up = True
        time = max(posted, ready)
        if self._transfer:
            time = lane.free = max(time, lane.free) + self._transfer
        time += self.latency
        lane.completes_send(time)
        self._arrived[route.target.rank][wanted] = time
        if lane.parks:
            lane.arrive(wanted, time)
        if self._on_message is not None:
            self._on_message(route, wanted.first, posted, time)
        woken.update((route.source.rank, route.target.rank))

    # --- looking at it ----------------------------------------------------------------------------------------------

    def copy(self) -> Machine:
        """An independent machine in the same state (programs are shared)."""
        twin = copy.copy(self)
        twin.clock = list(self.clock)
        twin._queues = [deque(_Segment(s.instructions, s.t, s.place) for s in queue) for queue in self._queues]
        twin._lanes = [lane.copy() for lane in self._lanes]
        twin._arrived = [dict(a) for a in self._arrived]
        twin._collectives = self._collectives.copy()
        twin._host_copies = self._host_copies.copy()
        return twin

    def state(self, batches: int) -> object:
        """What is under way, with microbatches relative to batch `batches`: equal states have equal futures."""
        offset = batches * self._m

        def relative(messages: Iterable[Message]) -> tuple[Message, ...]:
            return tuple(Message(route, first - offset) for route, first in messages)

        lanes = tuple(lane.state(relative) for lane in self._lanes)
        rest = tuple(tuple((s.t - batches, s.place) for s in queue) for queue in self._queues)
        return lanes, tuple(relative(sorted(a)) for a in self._arrived), self._collectives.state(batches), rest

    def times(self) -> list[float]:
        """When each rank is free, and the times of all that `state` tells, in one order: a play with equal states whose
        times are all later by the same amount goes on as the other one, later by that amount."""
        found = list(self.clock)
        for lane in self._lanes:
            found += lane.times()
        for arrived in self._arrived:
            found += [arrived[message] for message in sorted(arrived)]
        return found + self._collectives.times() + self._host_copies.times()

    def _why(self, rank: int, segment: _Segment) -> Blocked:
        """Say why a rank cannot go on."""
        action, route_index, needs, _, awaits = segment.instructions[segment.place]
        t, offset = segment.t, segment.t * self._m
        unit = action.unit._replace(first=action.unit.first + (t if action.unit.kind is Kind.BATCH else offset))
        absolute = action._replace(unit=unit, reads=None)
        if route_index >= 0:
            route = self.lowered.routes[route_index]
            peer, does = (route.target, "receive") if action.op is Op.SEND else (route.source, "send")
            return Blocked(rank, absolute, f"rank {peer.rank} to {does} earlier {route.payload} messages")
        wanted = [Message(k.route, k.first + offset) for k in needs + awaits]
        missing = [k for k in wanted if k.first >= 0 and k not in self._arrived[rank]]
        if missing:
            route = self.lowered.routes[missing[0].route]
            name = format_unit(unit._replace(first=missing[0].first, count=route.count, slice=route.slice))
            return Blocked(rank, absolute, f"the {route.payload} of microbatch {name} from rank {route.source.rank}")
        if not self._collectives.has_room(action, t):
            return Blocked(rank, absolute, f"room for a full-size gradient, {self._collectives.why_no_room}")
        return Blocked(rank, absolute, "a reduction or decision that other ranks have not joined")


def _last(period: Sequence[Instruction]) -> list[Instruction]:
    """A period that no other one follows."""
    return [i for i in period if not i.ahead]


def _interacts(instruction: Instruction) -> bool:
    of_others = instruction.route >= 0 or instruction.needs or instruction.awaits
    return bool(of_others or instruction.action.unit.kind is Kind.BATCH)


def _adds(instruction: Instruction) -> bool:
    return any(p.op in ADDING for p in passes(instruction.action))


def _waits(blocked: list[Blocked]) -> str:
    lines = "\n".join(f"  rank {b.rank} at {b.action} waits for {b.reason}" for b in sorted(blocked))
    what = f"deadlock: {len(blocked)} rank{'s' * (len(blocked) > 1)} would wait for ever"
    return f"{what}\n{lines}"
