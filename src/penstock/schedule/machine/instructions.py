"""The lowered form of a schedule: instructions and the messages between ranks.

Machine model (docs/design.md, section 4). Each rank runs its instructions in order on one compute lane. A SEND is
posted directly after its producer and completes when the peer has posted the matching RECV. Messages of one payload
from one rank to another travel on one first-in first-out lane, on which at most `window` messages are outstanding:
posted sends that have not completed, and posted receives that have not been consumed. A RECV is posted as soon as a
buffer is free, but at most `lookahead` actions ahead of its consumer: as many as the window, unless told otherwise.

Where a version may be rejected, the period is there twice: with what follows a rejection
(`penstock.schedule.transforms.post_validation`), and without.

The period is lowered once. A RECV whose consumer stands at the start of the next period is posted in the tail of this
one and marked `ahead`; it vanishes when the pipeline drains instead. It is never posted before the first message of
this period has been consumed, because that message carries the decision to continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.schedule.ir.schedule import WINDOW, Action, Op, Payload, Schedule, Stage


class LaneKey(NamedTuple):
    """A first-in first-out lane of messages."""

    source: int
    target: int
    payload: Payload

    def __str__(self) -> str:
        return f"the {self.payload} lane from rank {self.source} to rank {self.target}"


class Message(NamedTuple):
    """The identity of a message: its route and its unit's first microbatch."""

    route: int
    first: int


@dataclass(frozen=True, slots=True)
class Route:
    """All messages between two stages that differ only in their microbatch."""

    payload: Payload
    source: Stage
    target: Stage
    count: int
    slice: tuple[int, int] | None

    @property
    def lane(self) -> LaneKey:
        """The lane on which the route's messages travel."""
        return LaneKey(self.source.rank, self.target.rank, self.payload)


class Instruction(NamedTuple):
    """An action with its messages.

    Attributes:
        action: numbers are relative to the period (or epilogue) in which the instruction stands.
        route: of a SEND or RECV, an index into `Lowered.routes`; -1 otherwise.
        needs: the messages that a pass consumes; HOLD and FETCH take them as soon as they come, without waiting.
        ahead: a RECV for a consumer in the next period.
        awaits: the messages that HOLD and FETCH before it have taken, and that must have come.
        report_lag: the report of the batch so many periods before its own is handed out before it; None where ranks do
            so of their own accord, as soon as nobody waits for them.
    """

    action: Action
    route: int = -1
    needs: tuple[Message, ...] = ()
    ahead: bool = False
    awaits: tuple[Message, ...] = ()
    report_lag: int | None = None

    @property
    def repairs(self) -> bool:
        """Whether it exists only where a version has been rejected."""
        return self.action.op is Op.REDO or self.action.payload is Payload.REPAIR


class LoweredProgram(NamedTuple):
    """One rank's instructions.

    Attributes:
        period, epilogue: as in the schedule.
        rejected: the period where VALIDATE rejects a version; the same up to VALIDATE. Empty where there is none.
    """

    period: tuple[Instruction, ...]
    epilogue: tuple[Instruction, ...]
    rejected: tuple[Instruction, ...] = ()

    @property
    def places_reports(self) -> bool:
        """Whether its instructions say where reports are handed out."""
        return any(instruction.report_lag is not None for instruction in self.period)


@dataclass(frozen=True)
class Lowered:
    """A schedule with its messages.

    Attributes:
        schedule: without them.
        routes: who sends to whom, and what.
        programs: the instructions of every rank.
        window: messages that may be outstanding on a lane, on either side.
    """

    schedule: Schedule
    routes: tuple[Route, ...]
    programs: tuple[LoweredProgram, ...]
    window: int = WINDOW

    @cached_property
    def lanes(self) -> tuple[LaneKey, ...]:
        """Every lane in use, in a fixed order."""
        return tuple(sorted({route.lane for route in self.routes}))
