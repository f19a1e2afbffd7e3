"""In which order the ranks issue their messages, and whether all of these orders agree with one another.

A transport whose devices carry out messages one after another, as NCCL may do even on different communicators, needs
one order of all messages that every rank keeps: a SEND and its RECV are then one event of two ranks, and where no chain
of "issued before" leads back to its start, some message can always go next. Over gloo any order will do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.absolute_actions import existing
from penstock.schedule.ir.schedule import Action, Op
from penstock.schedule.machine.collective_state import Collectives, is_collective
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered, Message


class Issued(NamedTuple):
    """A SEND or RECV that a rank has issued.

    Attributes:
        lane: of the message.
        number: of the message on its lane.
    """

    lane: LaneKey
    number: int

    def __str__(self) -> str:
        return f"message {self.number} on {self.lane}"


class JoinedCollective(NamedTuple):
    """A collective that a rank has joined: it goes on, and does not know the result yet."""

    op: Op
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.op} of stage {self.stage}, batch {self.batch}"


class AwaitedCollective(NamedTuple):
    """A collective whose result a rank waits for."""

    collective: JoinedCollective


Event = Issued | JoinedCollective | AwaitedCollective


class _Before(NamedTuple):
    """Why one event comes before another one."""

    event: Issued | JoinedCollective
    rank: int


def one_order(orders: Sequence[Sequence[Event]]) -> list[Issued | JoinedCollective]:
    """Return an order of all events that agrees with the orders of all ranks.

    Args:
        orders: what each rank issues, in its order.

    Raises:
        ScheduleError: there is none; the message names a cycle.
    """
    before: dict[Issued | JoinedCollective, list[_Before]] = {}
    joined = {event for events in orders for event in events if isinstance(event, JoinedCollective)}
    for rank, events in enumerate(orders):
        last: list[Issued | JoinedCollective] = []
        for event in events:
            if isinstance(event, AwaitedCollective):
                last += [event.collective] if event.collective in joined else []
                continue
            before.setdefault(event, []).extend(_Before(earlier, rank) for earlier in last)
            if isinstance(event, Issued):  # what comes after a collective is joined does not wait for the others
                last = [event]
    after: dict[Issued | JoinedCollective, list[Issued | JoinedCollective]] = defaultdict(list)
    missing = {event: len(found) for event, found in before.items()}
    for event, found in before.items():
        for earlier in found:
            after[earlier.event].append(event)
    order = [event for event, count in missing.items() if not count]
    for event in order:  # which grows meanwhile
        for later in after[event]:
            missing[later] -= 1
            if not missing[later]:
                order.append(later)
    if len(order) < len(before):
        raise ScheduleError(_cycle(before, {event for event, count in missing.items() if count}))
    return order


def _cycle(before: Mapping[Issued | JoinedCollective, list[_Before]], left: set[Issued | JoinedCollective]) -> str:
    """Describe a cycle among events each of which comes after another one of them."""
    event, places, path = min(left, key=str), dict[Issued | JoinedCollective, int](), list[_Before]()
    while event not in places:
        places[event] = len(path)
        path.append(next(found for found in before[event] if found.event in left))
        event = path[-1].event
    cycle = path[places[event] :]
    later = [event, *(found.event for found in cycle)]
    lines = [f"  rank {found.rank} issues {found.event} before {later[i]}" for i, found in enumerate(cycle)]
    return "the ranks issue messages in orders that do not agree:\n" + "\n".join(reversed(lines))


def issued(lowered: Lowered, batches: int, rejected: Collection[int] = ()) -> list[list[Event]]:
    """Return what every rank issues in a span, in its order.

    Args:
        lowered: the schedule with its messages.
        batches: length of the span.
        rejected: batches whose update is made again.
    """
    collectives = Collectives(lowered.schedule, lambda _: 0.0)
    found = []
    for rank in range(lowered.schedule.ranks):
        counts: dict[LaneKey, int] = defaultdict(int)
        events: list[Event] = []
        for instruction, t, _ in span_instructions(lowered, rank, batches, rejected):
            if instruction.route >= 0:
                lane = lowered.routes[instruction.route].lane
                events.append(Issued(lane, counts[lane]))
                counts[lane] += 1
            else:
                events += _collective_events(instruction.action, t, collectives)
        found.append(events)
    return found


def _collective_events(action: Action, t: int, collectives: Collectives) -> Iterator[Event]:
    batch = action.unit.first + t
    if is_collective(action):
        yield JoinedCollective(action.op, collectives.members(action.op, action.stage)[0].index, batch)
    for op in collectives.waiting.get(action.op, ()):
        for first in collectives.members(op, action.stage)[:1]:
            yield AwaitedCollective(JoinedCollective(op, first.index, batch))


def span_instructions(
    lowered: Lowered, rank: int, batches: int, rejected: Collection[int] = ()
) -> Iterator[tuple[Instruction, int, list[Message]]]:
    """Yield what a rank runs in a span: the instructions, the batch their numbers count from, the messages consumed."""
    program, m = lowered.programs[rank], lowered.schedule.microbatches
    for t in range(-1, batches + 1):
        part = program.epilogue if t == batches else program.period
        if t - 1 in rejected and t not in (0, batches):
            part = program.rejected or part
        for instruction in part:
            if (instruction.ahead and t + 1 == batches) or (t < 0 and not instruction.ahead):
                continue
            if existing(instruction.action, t, m) is None:
                continue
            needs = [Message(route, k + t * m) for route, k in instruction.needs if k + t * m >= 0]
            yield instruction, t, needs


def buffers(lowered: Lowered, batches: int) -> int:
    """Return how many RECVs of a lane a span of batches has posted and not consumed at once."""
    most = 0
    for rank in range(lowered.schedule.ranks):
        held: dict[LaneKey, int] = defaultdict(int)
        for instruction, _, needs in span_instructions(lowered, rank, batches):
            for need in needs:
                held[lowered.routes[need.route].lane] -= 1
            if instruction.action.op is Op.RECV:
                lane = lowered.routes[instruction.route].lane
                held[lane] += 1
                most = max(most, held[lane])
    return most
