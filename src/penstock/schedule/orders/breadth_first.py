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
    groups = [range(first, min(first + size, microbatches)) for first in range(0, microbatches, size)]
    return make_order(
        [
            [
                pass_of(op, k, stage)
                for group_ in groups
                for op, chunks_ in ((Op.F, held), (Op.B, held[::-1]))
                for stage in chunks_
                for k in group_
            ]
            for held in by_rank(placed, stages)
        ],
        stages=placed,
    )
