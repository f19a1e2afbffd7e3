"""Collectives on the machine model: they begin when all members have issued them, block nobody, and keep one order.

All ranks of a group have one first-in first-out lane per operation (one communicator). A STEP waits for the reduction
of its batch, a pass for what was gathered on its node.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.schedule.ir import Action, Node, Op
from penstock.schedule.lowered import Lowered
from penstock.schedule.ops import OPS, Lane

Collective = tuple[Op, Node, int]
"""Operation, first node of the group, batch."""


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
            (op, node, batch), (_, other, earlier) = collective, self.order[place]
            raise ScheduleError(
                f"rank {rank} issues {op} of cut {node.cut}, batch {batch}, where another rank of its group issues it "
                f"of cut {other.cut}, batch {earlier}: all ranks of a group must issue collectives in one order"
            )

    def complete(self) -> None:
        """All ranks have issued the first one."""
        del self.order[0]
        self.places = {rank: place - 1 for rank, place in self.places.items()}


class Collectives:
    """Those that are under way.

    Args:
        lowered: the schedule.
        duration: time of one.
    """

    def __init__(self, lowered: Lowered, duration: Callable[[Action], float]) -> None:
        nodes = lowered.schedule.nodes
        self._holders = {node: tuple(n for n in nodes if n.cut == node.cut) for node in nodes}
        self._duration = duration
        self._lanes: dict[tuple[Op, tuple[int, ...]], _GroupLane] = {}
        self._issued: dict[Collective, dict[Node, float]] = {}  # by some of the group
        self._ready: dict[Node, float] = {}
        self._reduced: dict[tuple[Node, int], float | None] = {}  # when; None while others have not joined

    def issue(self, rank: int, action: Action, batch: int, now: float) -> list[tuple[Node, float, float]]:
        """Issue one; returns (member, start, end) for all members if this was the last of them.

        Raises:
            ScheduleError: other ranks of the group issue theirs in another order.
        """
        group = self._holders[action.node] if action.op is Op.REDUCE else (action.node,)
        collective = (action.op, group[0], batch)
        issued = self._issued.setdefault(collective, {})
        ranks = tuple(sorted({node.rank for node in group}))
        lane = self._lanes.setdefault((action.op, ranks), _GroupLane())
        if not any(node.rank == rank for node in issued):
            lane.issue(rank, collective)
        issued[action.node] = now
        if action.op is Op.REDUCE:
            self._reduced[action.node, batch] = None
        if len(issued) < len(group):
            return []
        start = max(lane.free, *issued.values())
        end = lane.free = start + self._duration(action)
        lane.complete()
        del self._issued[collective]
        for node in group:
            if action.op is Op.REDUCE:
                self._reduced[node, batch] = end
            else:
                self._ready[node] = max(self._ready.get(node, 0.0), end)
        return [(node, start, end) for node in group]

    def joined(self, action: Action, batch: int) -> bool:
        """Whether every rank has joined the reduction that a STEP waits for."""
        return action.op is not Op.STEP or self._reduced.get((action.node, batch), 0.0) is not None

    def done(self, action: Action, batch: int) -> float:
        """When the collectives that an action waits for are done."""
        if action.op is Op.STEP:
            return self._reduced.pop((action.node, batch), None) or 0.0
        return max(self._ready.get(p.node, 0.0) for p in action.parts or (action,))

    def state(self, batches: int) -> object:
        """What is under way, relative to batch `batches`."""
        issued = sorted((op, node, batch - batches, sorted(by)) for (op, node, batch), by in self._issued.items())
        orders = [
            (key, [(op, node, batch - batches) for op, node, batch in lane.order], sorted(lane.places.items()))
            for key, lane in sorted(self._lanes.items())
            if lane.order
        ]
        reduced = sorted((node, batch - batches, end is None) for (node, batch), end in self._reduced.items())
        return issued, orders, reduced

    def copy(self) -> Collectives:
        """An independent twin."""
        twin = copy.copy(self)
        twin._lanes = copy.deepcopy(self._lanes)
        twin._issued = {key: dict(by) for key, by in self._issued.items()}
        twin._ready, twin._reduced = dict(self._ready), dict(self._reduced)
        return twin


def is_collective(action: Action) -> bool:
    """Whether an action is one."""
    return not action.parts and OPS[action.op].lane is Lane.COLLECTIVE
