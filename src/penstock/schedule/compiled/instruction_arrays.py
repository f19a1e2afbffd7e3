"""The programs of a lowered schedule as arrays: what there is of every instruction but its costs.

Actions that cost the same and hold the same activations are of one *class*, which stands for them by an example; so
costs are asked for once per class, and no costs are needed before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.op_table import ACCEPTING, OPS, Lane
from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, passes
from penstock.schedule.ir.sharding import REPLICATED
from penstock.schedule.machine.collective_state import is_collective
from penstock.schedule.machine.gradient_room import ADDING
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered, Route
from penstock.schedule.machine.lane_state import is_host_copy

Numbers = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]

ACT, SEND, RECEIVE, JOIN, COPY = range(5)
"""Kinds of instructions: on the rank itself; both ends of messages; joining a collective; host copies."""
VERSION, GRADIENT = range(2)
"""Kinds of what an action uses."""


class CostClasses:
    """Numbers for actions that cost the same.

    Attributes:
        examples: an action of each class.
    """

    def __init__(self) -> None:
        self.examples: list[Action] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, action: Action) -> int:
        """Return the class of an action."""
        key = _key(action)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.examples)
            self.examples.append(action)
        return found

    def works(self) -> Flags:
        """Return which classes occupy the compute lane of a rank."""
        return np.array([bool(a.parts) or OPS[a.op].lane is Lane.COMPUTE for a in self.examples], dtype=bool)


def _key(action: Action) -> tuple[object, ...]:
    op, stage, (_, count, piece, kind, _), _, parts, peer, _ = action
    return tuple(map(_key, parts)) if parts else (op, stage, count, piece, kind, peer)


@dataclass(frozen=True)
class Code:
    """A part of one rank's program, an entry for each instruction, in its order. Numbers are relative, as in schedules.

    Attributes:
        kind: `ACT`, `SEND`, `RECEIVE`, `JOIN` or `COPY`.
        what: the class of an action; the route of a message.
        first: the first microbatch; of actions on batches, the batch.
        on_batch: whether `first` is a batch.
        ahead: RECVs for the next period.
        needs: rows of (entry, route, first microbatch) of the messages that an entry waits for.
        accepts: the same of the messages that an entry takes when they come.
        uses: of a sharded schedule, rows of (entry, kind of use, place of the stage in the schedule, number, first
            batch in whose period the action exists) of the versions that an entry reads or gathers (`VERSION`), and
            of the batches to whose gradients it adds (`GRADIENT`).
        rare: actions by entry that do not exist in every batch, or only in parts: fused ones, and AVERAGEs.
    """

    kind: NDArray[np.int8]
    what: NDArray[np.int32]
    first: Numbers
    on_batch: Flags
    ahead: Flags
    needs: Numbers
    accepts: Numbers
    uses: Numbers
    rare: dict[int, Action] = field(default_factory=dict)


class Unrolled(NamedTuple):
    """What a rank does in a span, entry by entry, as in `Code`; numbers count from the start of the span."""

    kind: NDArray[np.int8]
    what: NDArray[np.int32]
    first: Numbers
    needs: Numbers
    accepts: Numbers
    uses: Numbers


@dataclass(frozen=True)
class CodedSchedule:
    """A lowered schedule as arrays.

    Attributes:
        schedule: whose.
        classes: of its actions.
        programs: per rank the period, the epilogue, and the period in which a version is rejected.
        lanes: every lane in use.
        lane_of_route: the index of the lane of every route.
        window: messages that may be outstanding on a lane.
    """

    schedule: Schedule
    classes: CostClasses
    programs: Sequence[tuple[Code, Code, Code | None]]
    lanes: Sequence[LaneKey]
    lane_of_route: Numbers
    window: int


def coded(lowered: Lowered) -> CodedSchedule:
    """Return a lowered schedule as arrays; one that has been lowered as arrays has them."""
    known = getattr(lowered, "code", None)
    if isinstance(known, CodedSchedule):
        return known
    classes, schedule = CostClasses(), lowered.schedule
    programs = []
    for period, epilogue, rejected in lowered.programs:
        last = _code(rejected, classes, schedule) if rejected else None
        programs.append((_code(period, classes, schedule), _code(epilogue, classes, schedule), last))
    return CodedSchedule(
        lowered.schedule, classes, programs, lowered.lanes, lanes_of(lowered.routes, lowered.lanes), lowered.window
    )


def lanes_of(routes: Sequence[Route], lanes: Sequence[LaneKey]) -> Numbers:
    """Return the index of the lane of every route."""
    index = {lane: i for i, lane in enumerate(lanes)}
    return np.array([index[route.lane] for route in routes], dtype=np.int64)


def _code(instructions: Sequence[Instruction], classes: CostClasses, schedule: Schedule) -> Code:
    m, places = schedule.microbatches, {stage: i for i, stage in enumerate(schedule.stages)}
    sharded, uses = schedule.sharding != REPLICATED, list[tuple[int, int, int, int, int]]()
    kind, what, first, on_batch, ahead = bytearray(), list[int](), list[int](), bytearray(), bytearray()
    needs, accepts, rare = list[tuple[int, int, int]](), list[tuple[int, int, int]](), dict[int, Action]()
    for entry, (action, route, needed, early, awaited, _) in enumerate(instructions):
        unit = action.unit
        if route >= 0:
            kind.append(RECEIVE if action.op is Op.RECV else SEND)
            what.append(route)
        else:
            kind.append(JOIN if is_collective(action) else COPY if is_host_copy(action) else ACT)
            what.append(classes.of(action))
            wanted = accepts if action.op in ACCEPTING else needs
            wanted += [(entry, *message) for message in needed]
            needs += [(entry, *message) for message in awaited]
            if sharded:
                uses += [(entry, *use) for p in passes(action) for use in _uses(p, places[p.stage], m)]
            if unit.every > 1 or (action.parts and any(since(p.unit, m) > 0 for p in action.parts)):
                rare[entry] = action
        first.append(unit.first)
        on_batch.append(unit.kind is Kind.BATCH)
        ahead.append(early)
    return Code(
        np.frombuffer(kind, dtype=np.int8),
        np.array(what, dtype=np.int32),
        np.array(first, dtype=np.int64),
        np.frombuffer(on_batch, dtype=bool),
        np.frombuffer(ahead, dtype=bool),
        np.array(needs, dtype=np.int64).reshape(-1, 3),
        np.array(accepts, dtype=np.int64).reshape(-1, 3),
        np.array(uses, dtype=np.int64).reshape(-1, 5),
        rare,
    )


def _uses(action: Action, stage: int, m: int) -> Iterator[tuple[int, int, int, int]]:
    begins = since(action.unit, m)
    for version in () if action.reads is None else action.reads.versions:
        yield VERSION, stage, version, begins
    if action.op in ADDING:
        yield GRADIENT, stage, action.unit.first // m, begins
