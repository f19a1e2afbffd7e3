"""Says of a deadlock which rank waits at which action for which message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.errors import DeadlockError
from penstock.schedule.ir.schedule import Action, Kind, Op, format_unit
from penstock.schedule.machine.instructions import Instruction, Lowered, Message


class Blocked(NamedTuple):
    """A rank that waits when nothing moves any more.

    Attributes:
        rank: which one.
        action: at which it stands, with numbers counted from the beginning of the span.
        reason: what it waits for.
    """

    rank: int
    action: Action
    reason: str


def blocked_at(
    lowered: Lowered,
    rank: int,
    instruction: Instruction,
    t: int,
    has_come: Callable[[Message], bool],
    no_room: str = "",
) -> Blocked:
    """Say what a rank waits for.

    Args:
        lowered: the schedule with its messages.
        rank: the rank.
        instruction: at which it stands.
        t: the batch to which the instruction's numbers are relative.
        has_come: whether a message has arrived.
        no_room: why its rank cannot begin another full-size gradient; empty if it can.
    """
    action, route_index, needs, _, awaits, _ = instruction
    offset = t * lowered.schedule.microbatches
    unit = action.unit._replace(first=action.unit.first + (t if action.unit.kind is Kind.BATCH else offset))
    absolute = action._replace(unit=unit, reads=None)
    if route_index >= 0:
        route = lowered.routes[route_index]
        peer, does = (route.target, "receive") if action.op is Op.SEND else (route.source, "send")
        return Blocked(rank, absolute, f"rank {peer.rank} to {does} earlier {route.payload} messages")
    wanted = (Message(need.route, need.first + offset) for need in needs + awaits)
    missing = next((message for message in wanted if message.first >= 0 and not has_come(message)), None)
    if missing is None:
        room = f"room for a full-size gradient, {no_room}" if no_room else ""
        return Blocked(rank, absolute, room or "a reduction or decision that other ranks have not joined")
    route = lowered.routes[missing.route]
    name = format_unit(unit._replace(first=missing.first, count=route.count, slice=route.slice))
    return Blocked(rank, absolute, f"the {route.payload} of microbatch {name} from rank {route.source.rank}")


def deadlock(blocked: Iterable[Blocked]) -> DeadlockError:
    """Return the error that names all ranks that wait."""
    stuck = sorted(blocked)
    lines = "\n".join(f"  rank {each.rank} at {each.action} waits for {each.reason}" for each in stuck)
    what = f"deadlock: {len(stuck)} rank{'s' * (len(stuck) > 1)} would wait for ever"
    return DeadlockError(f"{what}\n{lines}")
