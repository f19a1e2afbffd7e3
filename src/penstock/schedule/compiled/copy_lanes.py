"""Copies to the host's memory and back in the graph of a span: the lane of each rank is a chain of its own.

A copy begins when all actions of its rank before it have ended, and the copy before it, too. The first action on what
is brought back waits for that (`penstock.schedule.machine.lane_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from penstock.schedule.compiled.collective_events import Chain, NotCompiledError
from penstock.schedule.compiled.graph import OWN, START, WAIT, CopyLane
from penstock.schedule.compiled.instruction_arrays import ACT, COPY, CodedSchedule, Flags, Numbers, Unrolled
from penstock.schedule.ir.schedule import Action, Kind, Op
from penstock.schedule.machine.lane_state import TAKEN

_GRAPHS = {Op.F: 1, Op.B: -1, Op.I: -1, Op.OFFLOAD: -1, Op.FETCH: 1}


class CopyLanes:
    """Who waits for which copies.

    Args:
        code: the schedule.
        ranks: what each rank does.
        first: the first message that is free; that a copy is issued is one, and that it has been made is one.

    Attributes:
        waits: per rank, rows of (entry, message).
        first_free: one past the last message.
        used: the lanes that carry something, once their events are known.

    Raises:
        NotCompiledError: fused actions use what is copied.
    """

    def __init__(self, code: CodedSchedule, ranks: Sequence[Unrolled], first: int) -> None:
        self._code, self._copies = code, [np.flatnonzero(span.kind == COPY) for span in ranks]
        self._what = [span.what[copies] for span, copies in zip(ranks, self._copies, strict=True)]
        self._firsts = first + 2 * np.cumsum([0, *map(len, self._copies)])
        self.first_free = int(self._firsts[-1])
        if self.first_free > first and any(action.parts for action in code.classes.examples):
            raise NotCompiledError("fused actions may use what is copied to the host's memory and back")
        self._there = list[tuple[list[bool], list[int]]]()
        self.waits = [self._of(rank, span) for rank, span in enumerate(ranks)]
        self.used = list[CopyLane]()

    @cached_property
    def _using(self) -> Flags:
        """Which classes of actions may use what has been brought back."""
        actions = self._code.classes.examples
        return np.array([action.unit.kind is Kind.TRAIN or action.op is Op.STEP for action in actions], dtype=bool)

    def _of(self, rank: int, span: Unrolled) -> Numbers:
        copies, examples = self._copies[rank], self._code.classes.examples
        found, away, there, graphs = list[tuple[int, int]](), list[bool](), list[int](), 0
        if len(copies):
            made = dict(zip(copies.tolist(), range(int(self._firsts[rank]) + 1, self.first_free, 2), strict=False))
            wanted = (span.kind == COPY) | ((span.kind == ACT) & self._using[span.what])
            back: dict[tuple[object, ...], int] = {}
            for entry in np.flatnonzero(wanted).tolist():
                action, first = examples[span.what[entry]], int(span.first[entry])
                graphs += _GRAPHS.get(action.op, 0) * action.unit.count
                if entry in made:
                    away.append(action.op is Op.OFFLOAD)
                    there.append(graphs + away[-1])
                for key in _keys(action, first):
                    if entry not in made:
                        if key in back:
                            found.append((entry, back.pop(key)))
                    elif action.op in TAKEN:
                        back[key] = made[entry]
        self._there.append((away, there))
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def events(
        self, chains: Sequence[Chain], firsts: Numbers, event: int, posted: Numbers, ready: Numbers
    ) -> list[tuple[Numbers, Numbers]]:
        """Return the classes and the messages of the events of each lane that is used.

        Args:
            chains: of the ranks.
            firsts: the first event of each of these.
            event: the first one that is free.
            posted, ready: of all messages, to be filled in.
        """
        found = list[tuple[Numbers, Numbers]]()
        for rank, copies in enumerate(self._copies):
            if not len(copies):
                continue
            issued = self._firsts[rank] + 2 * np.arange(len(copies))
            posted[issued] = ready[issued] = firsts[rank] + chains[rank].after[copies]
            posted[issued + 1] = ready[issued + 1] = event + 1 + np.arange(len(copies))
            away, there = map(np.array, self._there[rank])
            self.used.append(CopyLane(rank, event + 1, away, there))
            found.append((np.concatenate([[WAIT], OWN + self._what[rank]]), np.concatenate([[START], issued])))
            event += 1 + len(copies)
        return found


def _keys(action: Action, first: int) -> list[tuple[object, ...]]:
    """Return what an action copies or uses."""
    if action.unit.kind is Kind.BATCH:
        return [(action.stage, first, -1)]
    return [(action.stage, first + n, action.unit.slice) for n in range(action.unit.count)]
