"""Plays orders in F, I and W on a chain of stages: when the passes of each rank end, and what it holds meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.schedule.ir.schedule import Action, Op


@dataclass(frozen=True)
class SearchTask:
    """The shape, times and memory that an order is searched for; memory in hundredths of a microbatch's activations.

    Attributes:
        ranks, microbatches: p and m.
        times: of F, I and W, in any unit.
        hop: time of a message, in the same unit.
        limit: what a rank may hold.
        held: what is left of a microbatch's activations between I and W.
    """

    ranks: int
    microbatches: int
    times: dict[Op, int]
    hop: int
    limit: int
    held: int


@dataclass
class Rank:
    """The passes that a rank has run, and what it holds.

    Attributes:
        free: when its last pass ends.
        ends: when its passes end, by kind and microbatch.
        found: its passes.
        memory, most: what it holds, and has held at most.
        idle: time between passes.
    """

    free: float = 0.0
    ends: dict[Op, list[float]] = field(default_factory=lambda: {Op.F: [], Op.I: [], Op.W: []})
    found: list[Action] = field(default_factory=list)
    memory: int = 0
    most: int = 0
    idle: float = 0.0

    @property
    def span(self) -> float:
        """From the end of its first pass to that of its last one."""
        return self.free - self.ends[Op.F][0]

    def done(self, op: Op) -> int:
        """How many passes of a kind have been placed."""
        return len(self.ends[op])


def input_at(task: SearchTask, ranks: Sequence[Rank], s: int, op: Op) -> float:
    """When there is what the next pass of a kind needs; infinite while nobody knows."""
    k, own = ranks[s].done(op), ranks[s].ends
    if op is Op.W:
        there, hop = own[Op.I], 0
    elif op is Op.I and s + 1 == task.ranks:
        there, hop = own[Op.F], 0
    elif op is Op.F and s == 0:
        return 0.0
    else:
        there, hop = ranks[s - 1 if op is Op.F else s + 1].ends[op], task.hop
    return there[k] + hop if k < len(there) else math.inf


def place(task: SearchTask, rank: Rank, action: Action, begin: float) -> None:
    """Let a rank run a pass."""
    if rank.found:
        rank.idle += begin - rank.free
    rank.free = begin + task.times[action.op]
    rank.ends[action.op].append(rank.free)
    rank.found.append(action)
    rank.memory += {Op.F: 100, Op.I: task.held - 100, Op.W: -task.held}[action.op]
    rank.most = max(rank.most, rank.memory)


def replay(task: SearchTask, programs: Sequence[Sequence[Action]]) -> list[Rank]:
    """The ranks after a given order, which must be free of deadlock: each pass begins as soon as it can."""
    ranks = [Rank() for _ in programs]
    while any(len(rank.found) < len(program) for rank, program in zip(ranks, programs, strict=True)):
        for s, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
            for action in program[len(rank.found) :]:
                begin = input_at(task, ranks, s, action.op)
                if begin == math.inf:
                    break
                place(task, rank, action, max(begin, rank.free))
    return ranks
