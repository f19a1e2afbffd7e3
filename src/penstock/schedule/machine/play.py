"""Plays lowered programs on the machine model: who runs when, who waits for whom.

One small interpreter serves the proof (every duration zero: does anything wait for ever?) and the simulator (durations
from costs: when does everything start and end?). Its rules are those of `penstock.schedule.machine.instructions`. The
play is deterministic: each rank runs in order and each lane is first in, first out, so the order in which the
interpreter visits the ranks changes nothing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from penstock.schedule.ir.absolute_actions import existing
from penstock.schedule.ir.op_table import ACCEPTING
from penstock.schedule.ir.schedule import Action, Kind, Op, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.machine.collective_state import Collectives, is_collective
from penstock.schedule.machine.deadlock import Blocked, blocked_at, deadlock
from penstock.schedule.machine.gradient_room import ADDING
from penstock.schedule.machine.instructions import Instruction, Lowered, LoweredProgram, Message
from penstock.schedule.machine.lane_state import HostCopies, is_host_copy
from penstock.schedule.machine.message_lanes import Latency, MessageLanes, MessageObserver

Observer = Callable[[int, Action, int, float, float], None]
"""Called as (rank, action with relative numbers, batch they are relative to, start, end)."""


@dataclass
class _Segment:
    """A part of a rank's program that is being played."""

    instructions: Sequence[Instruction]
    t: int
    place: int = 0


def _instant(_action: Action) -> float:
    return 0.0


class Machine:
    """Plays the programs of all ranks, each with a clock of its own.

    Args:
        lowered: the schedule with its messages.
        duration: time an action occupies its lane; zero everywhere for a proof.
        latency: time from the moment both ends of a message are posted, and the message before it on its lane has been
            transferred, to its arrival; without its transfer. One for all links, or one for each (`latency_between`).
        observer: called for each action that is not a message.
        on_message: called for each message that arrives.
        transfer: time that a message occupies its lane.

    Attributes:
        copies_beside: whether something is copied to the host's memory and back, beside the passes.
        messages: those that are under way, or have come and are not consumed.
    """

    def __init__(
        self,
        lowered: Lowered,
        duration: Callable[[Action], float] = _instant,
        latency: Latency = 0.0,
        observer: Observer | None = None,
        on_message: MessageObserver | None = None,
        transfer: float = 0.0,
    ) -> None:
        self.lowered, self.observer = lowered, observer
        self._proves = observer is None and duration is _instant
        self._m = lowered.schedule.microbatches
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
        self._queues: list[deque[_Segment]] = [deque() for _ in range(ranks)]
        self.messages = MessageLanes(lowered, self.clock, latency, transfer, on_message)
        self._collectives = Collectives(lowered.schedule, duration)
        self._host_copies = HostCopies(ranks)

    def _variants(self, program: LoweredProgram) -> tuple[Sequence[Instruction], ...]:
        parts: list[Sequence[Instruction]] = list(program)
        sharding, directions = self.lowered.schedule.sharding, self.lowered.schedule.directions
        joined = directions > 1 and sharding.level is not Level.NONE  # GATHERs, for which any pass may wait
        if self._proves and not joined:  # passes that wait for nobody take no part
            limited = sharding.gradients is not None
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
            self._append([codes[which] for codes in self._codes], t)
            self._go_on()

    def play_epilogue(self, batches: int) -> None:
        """Play the epilogue of a span of `batches` batches on every rank.

        Raises:
            ScheduleError: some ranks wait for ever.
        """
        self._append([codes[3] for codes in self._codes], batches)
        self._go_on()
        stuck = [self._blocked(rank, queue[0]) for rank, queue in enumerate(self._queues) if queue]
        if stuck:
            raise deadlock(stuck)

    def _append(self, parts: list[Sequence[Instruction]], t: int) -> None:
        """Append a part to every rank's queue."""
        for queue, part in zip(self._queues, parts, strict=True):
            queue.append(_Segment(part, t))

    def _go_on(self) -> None:
        """Advance the ranks as far as they go."""
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
        queue, clock, messages = self._queues[rank], self.clock, self.messages
        beside = self._collects or self.copies_beside
        while queue:
            segment = queue[0]
            instructions, t, offset = segment.instructions, segment.t, segment.t * self._m
            for place in range(segment.place, len(instructions)):
                action, route, needs, _, awaits, _ = instructions[place]
                op, unit = action[0], action[2]
                first = unit[0] + offset
                if route >= 0:
                    if first < 0:
                        continue
                    if not (messages.receive if op is Op.RECV else messages.send)(rank, Message(route, first), woken):
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
                    messages.accept(rank, needs, offset)
                    needs = ()
                if awaits:
                    needs += awaits
                if needs:
                    ready = messages.consume(rank, needs, offset)
                    if ready is None:
                        break
                    start = max(start, ready)
                if beside:
                    copied = self._host_copies.done(action, t, self._m)
                    start = max(start, self._collectives.done(action, first, t), copied)
                if not self._act(rank, action, t, start, len(needs)):
                    segment.place = place + 1
                    return
            else:
                queue.popleft()
                continue
            segment.place = place
            return

    def _act(self, rank: int, action: Action, t: int, start: float, received: int) -> bool:  # noqa: ARG002
        """Run an action that consumes messages; False if its end is not known before others have gone on."""
        end = self.clock[rank] = start + self._duration(action)
        if self.observer is not None:
            self.observer(rank, action, t, start, end)
        return True

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
        start, end = self._host_copies.issue(rank, action, t, self._m, self.clock[rank], self._duration(action))
        if self.observer is not None:
            self.observer(rank, action, t, start, end)
        return True

    # --- looking at it ----------------------------------------------------------------------------------------------

    @property
    def held_up(self) -> bool:
        """Whether a SEND or RECV has waited for room, or a message on its way for its RECV."""
        return self.messages.held_up

    def copy(self) -> Machine:
        """An independent machine in the same state (programs are shared)."""
        twin = copy.copy(self)
        twin.clock = list(self.clock)
        twin._queues = [deque(_Segment(s.instructions, s.t, s.place) for s in queue) for queue in self._queues]
        twin.messages = self.messages.copy(twin.clock)
        twin._collectives = self._collectives.copy()
        twin._host_copies = self._host_copies.copy()
        return twin

    def state(self, batches: int) -> object:
        """What is under way, with microbatches relative to batch `batches`: equal states have equal futures."""
        lanes, arrived = self.messages.state(batches * self._m)
        rest = tuple(tuple((s.t - batches, s.place) for s in queue) for queue in self._queues)
        return lanes, arrived, self._collectives.state(batches), rest

    def times(self) -> list[float]:
        """When each rank is free, and the times of all that `state` tells, in one order: a play with equal states whose
        times are all later by the same amount goes on as the other one, later by that amount."""
        return [*self.clock, *self.messages.times(), *self._collectives.times(), *self._host_copies.times()]

    def _blocked(self, rank: int, segment: _Segment) -> Blocked:
        """Say why a rank cannot go on."""
        instruction, t = segment.instructions[segment.place], segment.t
        no_room = "" if self._collectives.has_room(instruction.action, t) else self._collectives.why_no_room
        return blocked_at(self.lowered, rank, instruction, t, self.messages.arrived[rank].__contains__, no_room)


def _last(period: Sequence[Instruction]) -> list[Instruction]:
    """A period that no other one follows."""
    return [i for i in period if not i.ahead]


def _interacts(instruction: Instruction) -> bool:
    of_others = instruction.route >= 0 or instruction.needs or instruction.awaits
    return bool(of_others or instruction.action.unit.kind is Kind.BATCH)


def _adds(instruction: Instruction) -> bool:
    return any(p.op in ADDING for p in passes(instruction.action))
