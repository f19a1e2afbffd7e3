"""Plays passes in F, I and W on a V of two chunks per rank: when they run, under a limit of memory.

A pass is a pair of a kind, in the order in which a microbatch meets them on a rank, and a microbatch. Forwards of chunk
0 and backwards of chunk 1 go from rank to rank, those of the other chunk come back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.schedule.ir.schedule import Op
from penstock.schedule.orders.v_blocks import PERIOD, Block
from penstock.schedule.orders.zb_progress import SearchTask

F0, F1, I1, I0, W1, W0 = range(6)
CHUNKS = (0, 1, 1, 0, 1, 0)
OPS = (Op.F, Op.F, Op.I, Op.I, Op.W, Op.W)
WEIGHTS = 2
"""From the kind of an I to that of its W."""

VPass = tuple[int, int]
"""Kind, microbatch."""


@dataclass
class RankOnV:
    """The passes that a rank has run, and what it holds.

    Attributes:
        slots: the slot of the next pass of each kind that is no W; infinite when all of a kind have run.
        ends: when these passes end, by kind and microbatch.
        found: its passes.
        weights: the W that are put off.
        free: when its last pass ends.
        memory: in hundredths of a chunk's activations of a microbatch.
        returning: activations of chunk 1 among them.
    """

    slots: list[float]
    ends: tuple[list[float], ...] = field(default_factory=lambda: ([], [], [], []))
    found: list[VPass] = field(default_factory=list)
    weights: deque[VPass] = field(default_factory=deque)
    free: float = 0.0
    memory: int = 0
    returning: int = 0

    def run(self, task: SearchTask, kind: int, now: float) -> None:
        """Let it run the next pass of a kind."""
        self.free = now + task.times[OPS[kind]]
        if kind >= W1:
            self.found.append(self.weights.popleft())
            self.memory -= task.held
            self.returning -= CHUNKS[kind]
            return
        k = len(self.ends[kind])
        self.found.append((kind, k))
        self.ends[kind].append(self.free)
        self.slots[kind] = self.slots[kind] + PERIOD if k + 1 < task.microbatches else math.inf
        if kind <= F1:
            self.memory += 100
            self.returning += CHUNKS[kind]
        else:
            self.memory -= 100 - task.held
            self.weights.append((kind + WEIGHTS, k))

    def has_room(self, task: SearchTask, kind: int) -> bool:
        """A forward of chunk 0 leaves room for one of chunk 1, without which nothing would ever come back."""
        reserved = 100 if kind == F0 and not self.returning else 0
        return kind > F1 or self.memory + 100 + reserved <= task.limit


Source = tuple[list[float], int] | None
"""Ends of the passes that those of a kind wait for, and the time of the message between; None if they wait for none."""


def sources_of(task: SearchTask, ends: Sequence[Sequence[list[float]]]) -> list[list[Source]]:
    """What the passes of each rank that are no W wait for, by kind.

    Args:
        task: the shape of the V.
        ends: of the passes, by rank, kind and microbatch; filled later.
    """
    found: list[list[Source]] = []
    for s, own in enumerate(ends):
        row: list[Source] = []
        for kind in (F0, F1, I1, I0):
            before = s - 1 if kind in (F0, I1) else s + 1
            if 0 <= before < task.ranks:
                row.append((ends[before][kind], task.hop))
            else:
                row.append((own[kind - 1], 0) if kind else None)
        found.append(row)
    return found


def push_together(task: SearchTask, block: Block, slack: float, gap: float) -> list[list[VPass]]:
    """The order that comes out when building blocks are repeated and every rank runs what is ready.

    Args:
        task: shape, times of a chunk's passes, and memory in hundredths of a chunk's activations.
        block: the building block, which says what is next on a rank.
        slack: slots by which a pass may be before its turn.
        gap: a W is run where the rank would idle for at least this part of its time.

    Returns:
        The passes of each rank.
    """
    ranks = [RankOnV(list(slots)) for slots in block]
    sources = sources_of(task, [rank.ends for rank in ranks])
    now, allowed = 0.0, slack
    while any(len(rank.found) < PERIOD * task.microbatches for rank in ranks):
        moved, later = False, math.inf
        for rank, needs in zip(ranks, sources, strict=True):
            if rank.free <= now:
                kind, next_one = _choose(task, rank, needs, now, allowed, gap)
                if kind is None:
                    later = min(later, next_one)
                    continue
                rank.run(task, kind, now)
                moved = True
            later = min(later, rank.free)
        if later < math.inf:
            now, allowed = later, slack if moved else allowed
        elif allowed == math.inf:
            raise AssertionError(f"v-auto: no rank can go on after {[len(rank.found) for rank in ranks]} passes")
        else:
            allowed = math.inf  # memory forbids what is next: anything that is ready may go before it
    return [rank.found for rank in ranks]


def _choose(
    task: SearchTask, rank: RankOnV, needs: Sequence[Source], now: float, slack: float, gap: float
) -> tuple[int | None, float]:
    """The kind that a free rank runs now, or None and when it can go on."""
    turn, full, following = None, False, math.inf
    for kind in sorted((F0, F1, I1, I0), key=rank.slots.__getitem__):
        if rank.slots[kind] == math.inf or (turn is not None and rank.slots[kind] > turn + slack):
            break
        source, k = needs[kind], len(rank.ends[kind])
        ready = 0.0 if source is None else source[0][k] + source[1] if k < len(source[0]) else math.inf
        if not rank.has_room(task, kind):
            full = full or ready <= now
            continue
        turn = rank.slots[kind] if turn is None else turn
        if ready <= now:
            return kind, now
        following = min(following, ready)
    if rank.weights and (full or following - now >= gap * task.times[Op.W]):
        return rank.weights[0][0], now
    return None, following
