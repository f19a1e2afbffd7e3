"""Finds who waits for parked activations: HOLD and FETCH take them as soon as they come, and do not wait themselves.

A RETURN waits for what its HOLD has taken, and the first action on a microbatch behind its FETCH (a backward, a
recompute, another OFFLOAD) for what that has taken. They may stand in a later period than the move, or, where the span
ends before, in the epilogue.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from penstock.schedule.ir.op_table import ACCEPTING
from penstock.schedule.ir.schedule import Action, Kind, Op, Program, Schedule, passes
from penstock.schedule.machine.instructions import Message

Place = tuple[int, int, int]
"""A rank, a part of its program (0: period, 1: epilogue), and a position in it."""

_NEVER = sys.maxsize


def awaited(schedule: Schedule, needs: Mapping[Place, Sequence[Message]]) -> dict[Place, list[Message]]:
    """Return, by place, the messages that an action waits for because a move has taken them.

    Args:
        schedule: any schedule.
        needs: by place, the messages that actions take; those of others than HOLD and FETCH do not matter.
    """
    found: dict[Place, list[Message]] = {}
    for (rank, part, position), messages in needs.items():
        program, m = schedule.programs[rank], schedule.microbatches
        move = program[part][position]
        if move.op in ACCEPTING:
            for users_part, user, lag in _users(program, part, position, m):
                moved = [message._replace(first=message.first - lag * m) for message in messages]
                found.setdefault((rank, users_part, user), []).extend(moved)
    return found


def _users(program: Program, part: int, position: int, m: int) -> Iterator[tuple[int, int, int]]:
    """Yield who uses first what a move has taken: where no span ends before, then in the epilogues of spans that do.

    Yields:
        (part, position, periods behind that of the move).
    """
    move = program[part][position]
    later = [use for use in _uses(program[part], move, m) if use > (0, position)]
    behind, position = min(later, default=(_NEVER, 0))
    if later:
        yield part, position, behind
    ends: dict[int, int] = {}  # the first use in the epilogue of a span that ends so many periods behind
    for lag, i in () if part else _uses(program.epilogue, move, m):
        if 0 < lag <= behind:
            ends.setdefault(lag, i)
    yield from ((1, i, lag) for lag, i in ends.items())


def _uses(actions: Sequence[Action], move: Action, m: int) -> list[tuple[int, int]]:
    """List how many periods behind a move, and at which position, the users of what it has taken stand."""
    found = []
    for position, action in enumerate(actions):
        lags = [lag for p in passes(action) if (lag := _lag(move, p, m)) is not None]
        found += [(min(lags), position)] if lags else []
    return found


def _lag(move: Action, user: Action, m: int) -> int | None:
    """How many periods behind a move an action uses what that has taken; None if it does not."""
    if user.stage != move.stage or user.unit.slice != move.unit.slice or user.unit.kind is Kind.BATCH:
        return None
    if move.op is Op.HOLD:
        uses = user.op is Op.RETURN and user.peer == move.peer
    else:
        uses = user.op not in (Op.HOLD, Op.RETURN)  # which are about microbatches of the peer
    own, taken = user.unit, move.unit
    lag = taken.first // m - own.first // m  # no unit crosses the border of a batch
    first = own.first + lag * m
    overlaps = first < taken.first + taken.count and taken.first < first + own.count
    return lag if uses and overlaps and lag >= 0 else None
