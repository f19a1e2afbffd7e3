"""Breadth-first on several chunks per rank (Lamy-Poirier, arXiv 2211.05953), also called modular pipeline parallelism
with layered gradient accumulation (Lamy-Poirier, arXiv 2106.02679).

Stage c lies on rank c mod p. All microbatches go through chunk 0, then all through chunk 1, and so on; backwards take
the chunks the other way round. The bubble is that of interleaved 1F1B, and every rank holds m microbatches. What it
buys: the weights of a chunk serve all microbatches in a row, so sharded weights are gathered, and gradients reduced,
once per chunk and pass instead of once per group of microbatches.

p=2, v=2, m=3 (lower case is chunk 1):
    r0: F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2
    r1: F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2

Backwards run first in, first out, so that gradients accumulate in microbatch order; the makespan is that of the
reversed order, too. With `group`, groups of microbatches run one after the other, forwards and backwards of each
breadth-first (Fast-LLM's hybrid of breadth-first and depth-first accumulation): less memory, more gathers and more
bubble.

US patent 12,585,929 B2 (granted 2026-03-24) concerns finishing the backward of all microbatches of a layer before that
of an earlier layer; whether it concerns you is yours to judge."""

from __future__ import annotations

import numpy as np

from penstock.schedule.ir.arrays import ActionArrays, ArrayOrder, B, F, ProgramArrays
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, looped
from penstock.schedule.ir.schedule import Op


def breadth_first(stages: int, microbatches: int, *, chunks: int = 2, group: int | None = None) -> Order:
    """Run all forwards of a chunk, then those of the next chunk; backwards in the reverse order of chunks.

    Args:
        stages: p, the ranks.
        microbatches: m.
        chunks: v, stages per rank.
        group: microbatches that run together; all if None.
    """
    placed, size = looped(stages, chunks), group or microbatches
    programs = []
    for held in by_rank(placed, stages):
        chunks_ = np.array([stage.index for stage in held])[:, None]
        parts = [
            ActionArrays.of(op, turns, np.arange(first, min(first + size, microbatches)))
            for first in range(0, microbatches, size)
            for op, turns in ((F, chunks_), (B, chunks_[::-1]))
        ]
        programs.append(ProgramArrays(ActionArrays.joined(parts)))
    return ArrayOrder.of(programs, placed)


def endless_breadth_first(stages: int, microbatches: int, *, chunks: int = 2, late: int | None = None) -> Order:
    """Run breadth-first without flushes: a batch begins while the backwards of its predecessor's first chunk run.

    Args:
        stages: p, the ranks.
        microbatches: m; the bubble is 0 from max(2 (p - 1), p + 1) on, if a backward takes at least as long as a
            forward.
        chunks: v, stages per rank.
        late: microbatches whose backward through the first chunk the first rank puts off until it waits for others
            between its last forward and its first backward; the last rank none, those between them evenly fewer;
            2 (p - 1) if None.
    """
    placed = looped(stages, chunks)
    most = min(2 * (stages - 1) if late is None else late, microbatches)
    periods, epilogues = [], []
    for rank, held in enumerate(by_rank(placed, stages)):
        first, *others = held
        behind = -(-most * (stages - 1 - rank) // max(stages - 1, 1))
        before = [pass_of(Op.B, k, first) for k in range(-microbatches, 0)]
        forwards = [pass_of(Op.F, k, stage) for stage in held for k in range(microbatches)]
        backwards = [pass_of(Op.B, k, stage) for stage in reversed(others) for k in range(microbatches)]
        early = microbatches - behind
        periods.append([*before[:early], *forwards, *before[early:], *backwards])
        epilogues.append(before)
    return make_order(periods, epilogues, placed)
