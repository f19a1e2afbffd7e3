"""Collectives on the machine model: they begin when all members have issued them, block nobody, and keep one order.

All ranks of a group have one first-in first-out lane per operation (one communicator). Those of a batch on a stage come
one after the other (`batch_ops.COLLECTIVES`), and its STEP waits for them (for the decision its VALIDATE, where it has
one); a pass waits for the GATHER of the version that it reads. In a sharded schedule the GATHERs and REDUCEs of a rank
that wait for no other rank of its pipeline have one lane together: its network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.errors import ScheduleError
from penstock.schedule.ir.op_table import OPS, Lane
from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, Stage, Unit, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.machine.gradient_room import GradientRoom
from penstock.schedule.transforms.batch_ops import COLLECTIVES

Collective = tuple[Op, Stage, int]
"""Operation, first stage of the group, batch."""

Joined = list[tuple[Op, Stage, float, float]]
"""Operation, member, start, end: of all members of those that are complete."""

Carrier = Callable[[Op, tuple[Stage, ...], float, Callable[[float, float], Joined]], bool]
"""Takes a collective to a link, as (operation, its stages, when all have issued it, what to call with start and end);
False where it occupies none, and so takes a time that is known."""


@dataclass
class _GroupLane:
    """What the ranks of one group have issued of one operation."""

    order: list[Collective] = field(default_factory=list)  # issued by some rank, not by all
    places: dict[int, int] = field(default_factory=dict)  # how many of these each rank has issued
    free: float = 0.0

    def issue(self, rank: int, collective: Collective) -> None:
        place = self.places.get(rank, 0)
        self.places[rank] = place + 1
        if place == len(self.order):
            self.order.append(collective)
        elif self.order[place] != collective:
            (op, stage, batch), (_, other, earlier) = collective, self.order[place]
            raise ScheduleError(
                f"rank {rank} issues {op} of stage {stage.index}, batch {batch}, where another rank of its group "
                f"issues it "
                f"of stage {other.index}, batch {earlier}: all ranks of a group must issue collectives in one order"
            )

    def complete(self) -> None:
        """All ranks have issued the first one."""
        del self.order[0]
        self.places = {rank: place - 1 for rank, place in self.places.items()}


class Collectives:
    """Those that are under way.

    Args:
        schedule: any.
        duration: time of one.

    Attributes:
        waiting: the operations that wait for collectives of their batch and stage, and for which.
        carrier: of those that share links; None where each lane has one of its own.
    """

    def __init__(self, schedule: Schedule, duration: Callable[[Action], float]) -> None:
        stages = schedule.stages
        self._holders = {stage: tuple(n for n in stages if n.index == stage.index) for stage in stages}
        actions = [a for program in schedule.programs for a in program.period]
        self._joint = {op: tuple(sorted({a.stage for a in actions if a.op is op})) for op in (Op.TIE, Op.DECIDE)}
        self.waiting: dict[Op, tuple[Op, ...]] = {Op.STEP: COLLECTIVES}
        if any(a.op is Op.VALIDATE for a in actions):
            self.waiting = {Op.STEP: COLLECTIVES[:-1], Op.VALIDATE: COLLECTIVES[-1:]}
        self.carrier: Carrier | None = None
        self._duration = duration
        self._lanes: dict[tuple[Op, tuple[int, ...]], _GroupLane] = {}
        self._issued: dict[Collective, dict[Stage, float]] = {}  # by some of the group
        self._ready: dict[Stage, float] = {}
        # When a version was whole, of the last two of each stage; None while that is not known.
        self._gathered: dict[tuple[Stage, int], float | None] = {}
        self._gathering: dict[tuple[Stage, int], int] = {}  # which version, by stage and batch
        self._averaging = set[tuple[Stage, int]]()  # whose end is not known
        self._sharded = schedule.sharding.level is not Level.NONE
        self._gathers_alone = schedule.sharding.level is Level.FULL or schedule.directions == 1
        self._awaited: dict[Collective, float | None] = {}  # by a STEP: when done; None while others have not joined
        self._m, self._places = schedule.microbatches, schedule.sharding.gradients
        rooms = 0 if self._places is None else schedule.ranks
        self._rooms = [GradientRoom.of(self._places or 0) for _ in range(rooms)]

    def issue(self, rank: int, action: Action, batch: int, now: float) -> Joined:
        """Issue one; returns (operation, member, start, end) for all members of those that this makes complete.

        Raises:
            ScheduleError: other ranks of the group issue theirs in another order.
        """
        group = self.members(action.op, action.stage)
        collective = (action.op, group[0], batch)
        issued = self._issued.setdefault(collective, {})
        lane = self._lanes.setdefault(self.lane_key(action.op, group), _GroupLane())
        if not any(stage.rank == rank for stage in issued):
            lane.issue(rank, collective)
        issued[action.stage] = now
        if action.op in COLLECTIVES:
            self._awaited[action.op, action.stage, batch] = None
        elif action.op is not Op.GATHER:
            self._averaging.add((action.stage, batch))
        elif action.reads is not None:
            version = action.reads.versions[0] + batch - action.unit.first
            self._gathered = {
                (stage, v): end
                for (stage, v), end in self._gathered.items()
                if stage != action.stage or version - 1 <= v < version
            }
            self._gathered[action.stage, version] = None
            self._gathering[action.stage, batch] = version
        if self._rooms and action.op is Op.REDUCE:
            self._rooms[rank].reduce((action.stage, batch))
        return self._complete(collective)

    def _complete(self, collective: Collective) -> Joined:
        """Begin a collective if all have issued it, and what goes before it is done; returns what has a time then."""
        op, first, batch = collective
        group, issued = self.members(op, first), self._issued.get(collective, {})
        if len(issued) < len(group):
            return []
        times = list(issued.values())
        for earlier in COLLECTIVES[: COLLECTIVES.index(op)] if op in COLLECTIVES else ():
            for stage in group:
                ended = self._awaited.get((earlier, stage, batch), 0.0)
                if ended is None:
                    return []
                times.append(ended)
        lane = self._lanes[self.lane_key(op, group)]
        lane.complete()
        del self._issued[collective]
        if self.carrier is not None and self.carrier(op, group, max(times), partial(self._end, collective, group)):
            return []
        start = max(lane.free, *times)
        end = lane.free = start + self._duration(Action(op, first, Unit(batch, kind=Kind.BATCH)))
        return self._end(collective, group, start, end)

    def _end(self, collective: Collective, group: tuple[Stage, ...], start: float, end: float) -> Joined:
        """End a collective; returns its times, and those of what has waited for just that."""
        op, _, batch = collective
        for stage in group:
            if self._rooms and op is Op.REDUCE:
                self._rooms[stage.rank].ends((stage, batch), end)
            if op in COLLECTIVES:
                self._awaited[op, stage, batch] = end
            elif op is not Op.GATHER:
                self._averaging.discard((stage, batch))
                self._ready[stage] = max(self._ready.get(stage, 0.0), end)
            elif (stage, batch) in self._gathering:
                self._gathered[stage, self._gathering.pop((stage, batch))] = end
        done = [(op, stage, start, end) for stage in group]
        for later in COLLECTIVES[COLLECTIVES.index(op) + 1 :] if op in COLLECTIVES else ():
            if self._joint[later]:
                done += self._complete((later, self._joint[later][0], batch))
        return done

    def joined(self, action: Action, batch: int, t: int) -> bool:
        """Whether every rank has joined the collectives that an action, in the period of batch t, waits for."""
        waiting = self.waiting.get(action.op, ())
        if waiting:
            return all(self._awaited.get((op, action.stage, batch), 0.0) is not None for op in waiting)
        if self.carrier is not None and any(p.stage == stage for p in passes(action) for stage, _ in self._averaging):
            return False
        if (self.carrier is not None or not self._gathers_alone) and None in self._read_by(action, t):
            return False
        return not self._rooms or self.has_room(action, t)

    def _read_by(self, action: Action, t: int) -> list[float | None]:
        """When the versions were whole that an action reads."""
        reads = [(p.stage, v + t) for p in passes(action) if p.reads is not None for v in p.reads.versions]
        return [self._gathered.get(each, 0.0) for each in reads]

    @property
    def why_no_room(self) -> str:
        """Why the places for gradients are not free, in words."""
        return f"{self._places} at once: no REDUCE of another one comes before, or other ranks have not joined it"

    def has_room(self, action: Action, t: int) -> bool:
        """Whether it is known when there is room for the gradients that an action begins."""
        if not self._rooms:
            return True
        room = self._rooms[action.stage.rank]
        return room.has(len(room.new(action, t, self._m)))

    def done(self, action: Action, batch: int, t: int) -> float:
        """When the collectives that an action waits for are done, of a batch or in the period of batch t."""
        if action.op in self.waiting:
            waiting = self.waiting[action.op]
            return max(self._awaited.pop((op, action.stage, batch), None) or 0.0 for op in waiting)
        ready = max(self._ready.get(p.stage, 0.0) for p in action.parts or (action,))
        for p in (action.parts or (action,)) if self._gathered else ():
            for version in p.reads.versions if p.reads is not None else ():
                ready = max(ready, self._gathered.get((p.stage, version + t)) or 0.0)
                if p.op is Op.RELEASE:  # which nothing reads any more
                    self._gathered.pop((p.stage, version + t), None)
        if self._rooms:
            room = self._rooms[action.stage.rank]
            begun = room.new(action, t, self._m)
            ready = max(ready, room.take(begun)) if begun else ready
        return ready

    def state(self, batches: int) -> object:
        """What is under way, relative to batch `batches`."""
        issued = sorted((op, stage, batch - batches, sorted(by)) for (op, stage, batch), by in self._issued.items())
        orders = [
            (key, [(op, stage, batch - batches) for op, stage, batch in lane.order], sorted(lane.places.items()))
            for key, lane in sorted(self._lanes.items())
            if lane.order
        ]
        awaited = sorted((op, stage, batch - batches, end is None) for (op, stage, batch), end in self._awaited.items())
        rooms = [
            (
                sorted((stage, batch - batches) for stage, batch in room.begun),
                [end is None and key is not None and (key[0], key[1] - batches) for key, end in room.freed],
            )
            for room in self._rooms
        ]
        return issued, orders, awaited, rooms

    def times(self) -> list[float]:
        """When what is under way was issued, is done and lets the next one begin, in the order of `state`."""
        found = [lane.free for _, lane in sorted(self._lanes.items(), key=lambda item: item[0])]
        found += [by[stage] for _, by in sorted(self._issued.items()) for stage in sorted(by)]
        found += [self._ready[stage] for stage in sorted(self._ready)]
        found += [end for _, end in sorted(self._gathered.items()) if end is not None]
        found += [end for room in self._rooms for _, end in room.freed if end is not None]
        return found + [end for _, end in sorted(self._awaited.items()) if end is not None]

    def copy(self) -> Collectives:
        """An independent twin."""
        twin = copy.copy(self)
        twin._lanes = copy.deepcopy(self._lanes)
        twin._issued = {key: dict(by) for key, by in self._issued.items()}
        twin._ready, twin._gathered, twin._awaited = dict(self._ready), dict(self._gathered), dict(self._awaited)
        twin._rooms = [room.copy() for room in self._rooms]
        twin._gathering, twin._averaging = dict(self._gathering), set(self._averaging)
        return twin

    def lane_key(self, op: Op, group: tuple[Stage, ...]) -> tuple[Op, tuple[int, ...]]:
        """Return which lane an operation of a group occupies."""
        ranks = tuple(sorted({stage.rank for stage in group}))
        return (Op.GATHER if self._sharded and op is Op.REDUCE and len(ranks) == 1 else op), ranks

    def members(self, op: Op, stage: Stage) -> tuple[Stage, ...]:
        """Return the stages that take part in an operation on a stage; none where the schedule has none."""
        if op in self._joint:
            return self._joint[op]
        return self._holders[stage] if op is Op.REDUCE or (op is Op.GATHER and not self._gathers_alone) else (stage,)


def is_collective(action: Action) -> bool:
    """Whether an action is one."""
    return not action.parts and OPS[action.op].lane is Lane.COLLECTIVE
