"""Collectives in the graph of a span: each lane of them is a chain of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from penstock.schedule.compiled.graph import OWN, START, WAIT
from penstock.schedule.compiled.instruction_arrays import (
    ACT,
    GRADIENT,
    JOIN,
    VERSION,
    CodedSchedule,
    Flags,
    Numbers,
    Unrolled,
)
from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, Stage, Unit
from penstock.schedule.machine.collective_state import Collectives
from penstock.schedule.transforms.batch_ops import COLLECTIVES

Collective = tuple[Op, Stage, int, int]
"""Operation, first stage of the group, batch, and how many of the same there were before: a version may be gathered for
forwards and again for backwards, and a gradient summed in parts."""


class NotCompiledError(Exception):
    """The reason why the object machine has to play a span."""


class StuckError(NotCompiledError):
    """Some ranks wait for ever; the object machine says which."""

    def __init__(self) -> None:
        super().__init__("some ranks wait for ever")


class Chain(Protocol):
    """Where a rank is in its chain after each entry."""

    after: Numbers


@dataclass
class _Joint:
    """A collective: who issues it (rank, entry), and the collectives that it waits for, by their messages."""

    message: int
    members: int
    issued: list[tuple[int, int]] = field(default_factory=list)
    earlier: set[int] = field(default_factory=set)


class Joins:
    """Who waits for which collectives.

    Args:
        code: the schedule.
        ranks: what each rank does.
        first: the first message that is free; the result of a collective is one.

    Attributes:
        waits: per rank, rows of (entry, message).
        first_free: one past the last message.
        lanes: per lane, its collectives in order.
    """

    def __init__(self, code: CodedSchedule, ranks: Sequence[Unrolled], first: int) -> None:
        self.code, self._first = code, first
        self._found: dict[Collective, _Joint] = {}
        self._orders: dict[tuple[Op, tuple[int, ...]], dict[int, list[Collective]]] = {}
        joins = any((span.kind == JOIN).any() for span in ranks)
        self.waits = [self._of(rank, span) if joins else _none() for rank, span in enumerate(ranks)]
        self.lanes: list[list[Collective]] = []
        for orders in self._orders.values():
            order, *others = sorted(orders.values(), key=len, reverse=True)
            if any(other != order[: len(other)] for other in others):
                raise NotCompiledError("ranks issue collectives in different orders")
            self.lanes.append(order)
        issues = sum(len(joint.issued) for joint in self._found.values())
        self.first_free = first + len(self._found) + issues

    @cached_property
    def _rules(self) -> Collectives:
        """What the machine knows of collectives; many schedules have none, and then nobody asks."""
        return Collectives(self.code.schedule, lambda _: 0.0)

    @cached_property
    def _marked(self) -> tuple[Flags, Flags]:
        """Which classes of actions are GATHERs, and which wait for collectives; found once, for all ranks."""
        ops = [action.op for action in self.code.classes.examples]
        wanted = (Op.GATHER,), self._rules.waiting
        gathers, waiting = (np.array([op in each for op in ops], dtype=bool) for each in wanted)
        return gathers, waiting

    def joint(self, collective: Collective) -> _Joint:
        """Return what is known of a collective."""
        return self._found[collective]

    def _of(self, rank: int, span: Unrolled) -> Numbers:
        examples, rules = self.code.classes.examples, self._rules
        mine: dict[tuple[Op, Stage, int], int] = {}  # operation, stage of this rank and batch -> message
        ready: dict[Stage, dict[Op, int]] = {}
        joins, acts, (gathers, waiting) = span.kind == JOIN, span.kind == ACT, self._marked
        joined = {examples[what].op for what in np.unique(span.what[joins]).tolist()}
        readies = not joined <= {*COLLECTIVES, Op.GATHER}  # AVERAGE
        uses = first_uses(span, joins & gathers[np.where(joins, span.what, 0)])
        waits, whole = list[tuple[int, int]](), WholeState(self.code.schedule, uses)
        interesting = joins.copy()
        interesting[acts] = readies | waiting[span.what[acts]]
        interesting[uses[:, 0]] = True
        for entry in np.flatnonzero(interesting).tolist():
            action, batch = examples[span.what[entry]], int(span.first[entry])
            if span.kind[entry] == JOIN:
                message = self._issue(rank, entry, action, batch, mine)
                if action.op is Op.GATHER:
                    whole.gathers(entry, message)
                elif action.op not in COLLECTIVES:
                    ready.setdefault(action.stage, {})[action.op] = message
                elif action.op is Op.REDUCE:
                    whole.reduces(action.stage, batch, message)
            elif action.op in rules.waiting:
                wanted = [(op, action.stage, batch) for op in rules.waiting[action.op]]
                waits += [(entry, mine.pop(each)) for each in wanted if each in mine]
            else:
                for p in action.parts or (action,):
                    waits += [(entry, message) for message in ready.get(p.stage, {}).values()]
                waits += [(entry, message) for message in whole.waits(entry)]
        return np.array(waits, dtype=np.int64).reshape(-1, 2)

    def _issue(self, rank: int, entry: int, action: Action, batch: int, mine: dict[tuple[Op, Stage, int], int]) -> int:
        op, stage = action.op, action.stage
        group = self._rules.members(op, stage)
        if op not in COLLECTIVES and len(group) > 1:
            raise NotCompiledError(f"passes may use the result of {op} before or after it is there")
        collective = (op, group[0], batch, 0)
        while len(group) == 1 and collective in self._found:  # which nobody else joins
            collective = (*collective[:3], collective[3] + 1)
        joint = self._found.setdefault(collective, _Joint(self._first + len(self._found), len(group)))
        if (op, stage, batch) in mine and len(group) > 1:
            raise NotCompiledError(f"several {op}s of a batch have several members")
        if not any(by == rank for by, _ in joint.issued):
            lane = self._rules.lane_key(op, group)
            self._orders.setdefault(lane, {}).setdefault(rank, []).append(collective)
        joint.issued.append((rank, entry))
        if op in COLLECTIVES:
            place = COLLECTIVES.index(op)
            if any((later, stage, batch) in mine for later in COLLECTIVES[place + 1 :]):
                raise NotCompiledError(f"{op} follows a collective that waits for it")
            found = [mine[key] for key in ((earlier, stage, batch) for earlier in COLLECTIVES[:place]) if key in mine]
            if found and op not in self._rules.waiting[Op.STEP]:
                raise NotCompiledError(f"a STEP may take what {op} waits for before it")
            joint.earlier.update(found)
            mine[op, stage, batch] = joint.message
        return joint.message


def first_uses(span: Unrolled, gathers: Flags) -> Numbers:
    """Return the uses that may wait: of versions the GATHERs, and the first use after each; of gradients all.

    Args:
        span: what a rank does.
        gathers: which of its entries are GATHERs.
    """
    entry, kind, stage, number = span.uses.T
    order = np.lexsort((entry, number, stage, kind))
    found = span.uses[order]
    gather = gathers[found[:, 0]]
    first = np.zeros(len(found), dtype=bool)
    first[1:] = gather[:-1] & (found[1:, 1:] == found[:-1, 1:]).all(axis=1)
    counts: Numbers = found[gather | first | (found[:, 1] == GRADIENT)]
    return counts


class WholeState:
    """What of a rank's stages is whole: the messages of gathers, and of sums that free room for a gradient.

    Args:
        schedule: any.
        uses: of the rank, as `first_uses` has them.
    """

    def __init__(self, schedule: Schedule, uses: Numbers) -> None:
        self._stages = {stage: i for i, stage in enumerate(schedule.stages)}
        self._uses: dict[int, list[tuple[int, int, int]]] = {}
        for entry, *use in uses.tolist():
            self._uses.setdefault(entry, []).append((use[0], use[1], use[2]))
        self._gathered: dict[tuple[int, int], int] = {}
        self._begun: set[tuple[int, int]] = set()
        places = schedule.sharding.gradients
        self._freed: deque[int | None] | None = None if places is None else deque([None] * places)

    def gathers(self, entry: int, message: int) -> None:
        """Note a GATHER; of each stage the last two versions are known, as in the machine."""
        for _, stage, version in self._uses.get(entry, ()):
            self._gathered = {
                (other, v): known
                for (other, v), known in self._gathered.items()
                if other != stage or version - 1 <= v < version
            }
            self._gathered[stage, version] = message

    def reduces(self, stage: Stage, batch: int, message: int) -> None:
        """Note a REDUCE, at whose end another gradient may begin."""
        gradient = self._stages[stage], batch
        if self._freed is not None and gradient in self._begun:
            self._begun.discard(gradient)
            self._freed.append(message)

    def waits(self, entry: int) -> Iterator[int]:
        """Yield the messages that an action waits for."""
        for kind, stage, number in self._uses.get(entry, ()):
            key = stage, number
            if kind == VERSION and key in self._gathered:
                yield self._gathered[key]
            if kind == GRADIENT and self._freed is not None and key not in self._begun:
                self._begun.add(key)
                if not self._freed:
                    raise NotCompiledError("a gradient begins for which there is never room")
                message = self._freed.popleft()
                if message is not None:
                    yield message


class JointEvents:
    """The chains of the lanes of collectives.

    Args:
        joins: all collectives.
        chains: of the ranks.
        firsts: the first event of each of these, and one past the last.
        posted, ready: of all messages, to be filled in.

    Attributes:
        cls, message: per chain, of its events.
    """

    def __init__(self, joins: Joins, chains: Sequence[Chain], firsts: Numbers, posted: Numbers, ready: Numbers) -> None:
        self.cls, self.message = list[Numbers](), list[Numbers]()
        event = int(firsts[-1])
        issue = joins.first_free - sum(len(joins.joint(c).issued) for lane in joins.lanes for c in lane)
        for lane in joins.lanes:
            cls, message = [WAIT], [START]
            for collective in lane:
                joint = joins.joint(collective)
                for rank, entry in joint.issued:
                    posted[issue] = ready[issue] = firsts[rank] + chains[rank].after[entry]
                    message.append(issue)
                    issue += 1
                message += [*sorted(joint.earlier), START]
                if len(joint.issued) < joint.members:
                    message[-1] = 1  # never
                op, stage, batch, _ = collective
                example = Action(op, stage, Unit(batch, kind=Kind.BATCH))
                cls += [WAIT] * (len(message) - len(cls) - 1) + [OWN + joins.code.classes.of(example)]
                posted[joint.message] = ready[joint.message] = event + len(cls) - 1
            self.cls.append(np.array(cls))
            self.message.append(np.array(message))
            event += len(cls)


def _none() -> Numbers:
    return np.empty((0, 2), dtype=np.int64)
