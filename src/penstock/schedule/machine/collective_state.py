"""Collectives on the machine model: they begin when all members have issued them, block nobody, and keep one order.

All ranks of a group have one first-in first-out lane per operation (one communicator). Those of a batch on a stage come
one after the other (`batch_ops.COLLECTIVES`), and its STEP waits for them (for the decision its VALIDATE, where it has
one); a pass waits for the GATHER of the version that it reads. In a sharded schedule the GATHERs and REDUCEs of a rank
that wait for no other rank of its pipeline have one lane together: its network.

A sharded schedule may limit the full-size gradients that a rank has at once to k places. A backward that begins one
takes a place, which is free again when the REDUCE of that gradient has ended; places are taken in the order in which
their REDUCEs were issued, so the n-th gradient of a rank waits for the (n - k)-th REDUCE. (A rank whose places are all
taken by gradients that it has not reduced yet waits for ever.)
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.schedule.ir.op_table import OPS, Lane
from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, Stage, Unit, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.transforms.batch_ops import COLLECTIVES

ADDING = (Op.B, Op.I, Op.W)
"""Passes that add to a gradient."""

Collective = tuple[Op, Stage, int]
"""Operation, first stage of the group, batch."""


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


@dataclass
class GradientRoom:
    """The places of a rank for full-size gradients.

    Attributes:
        begun: stage and batch of those that backwards add to.
        freed: of the places that no backward adds to, in the order in which they are taken again: the gradient whose
            REDUCE frees it, and when that ends (None while other ranks have not joined it).
    """

    begun: set[tuple[Stage, int]]
    freed: deque[tuple[tuple[Stage, int] | None, float | None]]

    @classmethod
    def of(cls, places: int) -> GradientRoom:
        """Return room of which nothing is taken."""
        return cls(set(), deque([(None, 0.0)] * places))

    def new(self, action: Action, t: int, microbatches: int) -> set[tuple[Stage, int]]:
        """Return the gradients that an action in the period of batch t begins."""
        return {
            key
            for p in passes(action)
            if p.op in ADDING and (key := (p.stage, t + p.unit.first // microbatches)) not in self.begun
        }

    def has(self, places: int) -> bool:
        """Whether it is known when so many places are free."""
        return places <= len(self.freed) and all(self.freed[i][1] is not None for i in range(places))

    def take(self, gradients: set[tuple[Stage, int]]) -> float:
        """Begin gradients for which there is room; returns when there is."""
        self.begun |= gradients
        return max(self.freed.popleft()[1] or 0.0 for _ in gradients)

    def reduce(self, gradient: tuple[Stage, int]) -> None:
        """Issue the REDUCE of a gradient, which may be a part of it."""
        if gradient in self.begun:
            self.begun.remove(gradient)
            self.freed.append((gradient, None))

    def ends(self, gradient: tuple[Stage, int], end: float) -> None:
        """Note when the REDUCE of a gradient ends."""
        self.freed = deque((key, end if key == gradient and at is None else at) for key, at in self.freed)

    def copy(self) -> GradientRoom:
        """An independent twin."""
        return GradientRoom(set(self.begun), self.freed.copy())


class Collectives:
    """Those that are under way.

    Args:
        schedule: any.
        duration: time of one.

    Attributes:
        waiting: the operations that wait for collectives of their batch and stage, and for which.
    """

    def __init__(self, schedule: Schedule, duration: Callable[[Action], float]) -> None:
        stages = schedule.stages
        self._holders = {stage: tuple(n for n in stages if n.index == stage.index) for stage in stages}
        actions = [a for program in schedule.programs for a in program.period]
        self._joint = {op: tuple(sorted({a.stage for a in actions if a.op is op})) for op in (Op.TIE, Op.DECIDE)}
        self.waiting: dict[Op, tuple[Op, ...]] = {Op.STEP: COLLECTIVES}
        if any(a.op is Op.VALIDATE for a in actions):
            self.waiting = {Op.STEP: COLLECTIVES[:-1], Op.VALIDATE: COLLECTIVES[-1:]}
        self._duration = duration
        self._lanes: dict[tuple[Op, tuple[int, ...]], _GroupLane] = {}
        self._issued: dict[Collective, dict[Stage, float]] = {}  # by some of the group
        self._ready: dict[Stage, float] = {}
        # When a version was whole, of the last two of each stage; None while other ranks have not joined its GATHER.
        self._gathered: dict[tuple[Stage, int], float | None] = {}
        self._sharded = schedule.sharding.level is not Level.NONE
        self._gathers_alone = schedule.sharding.level is Level.FULL or schedule.directions == 1
        self._awaited: dict[Collective, float | None] = {}  # by a STEP: when done; None while others have not joined
        self._m, self._places = schedule.microbatches, schedule.sharding.gradients
        rooms = 0 if self._places is None else schedule.ranks
        self._rooms = [GradientRoom.of(self._places or 0) for _ in range(rooms)]

    def issue(self, rank: int, action: Action, batch: int, now: float) -> list[tuple[Op, Stage, float, float]]:
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
        if self._rooms and action.op is Op.REDUCE:
            self._rooms[rank].reduce((action.stage, batch))
        done = self._complete(collective)
        if action.op is Op.GATHER and action.reads is not None:
            version = action.reads.versions[0] + batch - action.unit.first
            self._gathered = {
                (stage, v): end
                for (stage, v), end in self._gathered.items()
                if stage != action.stage or version - 1 <= v < version
            }
            self._gathered[action.stage, version] = None
            self._gathered |= {(stage, version): end for _, stage, _, end in done}
        if done and action.op in COLLECTIVES:
            for op in COLLECTIVES[COLLECTIVES.index(action.op) + 1 :]:  # may have waited for just that
                if self._joint[op]:
                    done += self._complete((op, self._joint[op][0], batch))
        return done

    def _complete(self, collective: Collective) -> list[tuple[Op, Stage, float, float]]:
        """The times of a collective if all have issued it, and what goes before it is done."""
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
        start = max(lane.free, *times)
        end = lane.free = start + self._duration(Action(op, first, Unit(batch, kind=Kind.BATCH)))
        lane.complete()
        del self._issued[collective]
        for stage in group:
            if self._rooms and op is Op.REDUCE:
                self._rooms[stage.rank].ends((stage, batch), end)
            if op in COLLECTIVES:
                self._awaited[op, stage, batch] = end
            elif op is not Op.GATHER:
                self._ready[stage] = max(self._ready.get(stage, 0.0), end)
        return [(op, stage, start, end) for stage in group]

    def joined(self, action: Action, batch: int, t: int) -> bool:
        """Whether every rank has joined the collectives that an action, in the period of batch t, waits for."""
        waiting = self.waiting.get(action.op, ())
        if waiting:
            return all(self._awaited.get((op, action.stage, batch), 0.0) is not None for op in waiting)
        if not self._gathers_alone and None in self._read_by(action, t):
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
