"""How long a batch takes at least where ranks have several stages, however blocks are divided among the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from penstock.plan.candidates.block_chain import BlockChain, Floats
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import ActivationMemory, stage_forecast
from penstock.plan.candidates.rank_memory import RankWays
from penstock.simulate.memory.held import HeldKind

BlockBytes: TypeAlias = Mapping[bool, tuple[Floats, float]]
"""Bytes of each block on a rank at least, and what the rank holds more; without recompute and with it."""

_ROUNDING = 1 + 1e-9  # of sums in another order
_WITHOUT = 3  # of the fastest blocks at most are left out, such as an embedding, that any rank could take beside others


def least_divided(
    of: Candidate,
    chain: BlockChain,
    limits: Sequence[float],
    memory: Sequence[RankWays],
    hop: float,
) -> float:
    """Return the seconds that a batch takes at least, without sums; infinite if the ranks have no room for all blocks.

    Args:
        of: whose ranks have several stages.
        chain: its blocks.
        limits: bytes of each rank; may be infinite.
        memory: of each rank.
        hop: seconds of a message between ranks at least.
    """
    sizes = [_bytes_of_blocks(of, chain, rank, each) for rank, each in enumerate(memory)]
    whole = _least_of_whole_blocks(of, chain, limits, sizes, _outside(of, chain, hop))
    return whole if whole == math.inf else max(whole, _least_recomputed(of, chain, limits, sizes))


def _least_of_whole_blocks(
    of: Candidate, chain: BlockChain, limits: Sequence[float], sizes: Sequence[BlockBytes], outside: Floats
) -> float:
    """Return the seconds that a batch takes at least, as blocks are divided as a whole.

    A rank that is to have n of some blocks takes as long as with the n fastest of them, or longer, and as much memory
    as with the n smallest, or more; it recomputes all of them or none. Together the ranks have all of these blocks. So
    if the times of every rank with 1, 2, .. of N blocks are put in order, a batch takes the Nth of them at least:
    within less time the ranks can have fewer.

    Args:
        of: whose ranks have several stages.
        chain: its blocks.
        limits: bytes of each rank.
        sizes: what blocks take of each rank.
        outside: seconds in which others run before each rank begins and after it has ended.
    """
    passes, m = of.passes_of(chain), of.microbatches
    busy, path, forward = (np.diff(sums) for sums in (passes.busy, passes.path, passes.forward))
    order, least = np.argsort(-(busy + forward), kind="stable"), 0.0
    for count in range(max(len(order) - _WITHOUT, 1), len(order) + 1):
        some, times = order[:count], []
        seconds = [
            (m * _least_sums((busy + again * forward)[some]), m * _least_sums((path + again * forward)[some]))
            for again in (False, True)
        ]
        for rank, (limit, speed) in enumerate(zip(limits, of.speeds.tolist(), strict=True)):
            ways = []
            for again, (held, more) in sizes[rank].items():
                fits = _least_sums(held[some]) + more <= limit * _ROUNDING
                own, waited = seconds[again]
                ways.append(np.where(fits, np.maximum(own / speed, outside[rank] + waited / speed), np.inf))
            times.append(np.minimum.reduce(ways))
        least = max(least, float(np.partition(np.concatenate(times), count - 1)[count - 1]))
    return least


def _least_recomputed(of: Candidate, chain: BlockChain, limits: Sequence[float], sizes: Sequence[BlockBytes]) -> float:
    """Return the seconds that a batch takes at least, as some ranks have no room for much without recompute.

    A rank that recomputes nothing has no more blocks than fit, and the others run the rest, with two forwards. Of
    each the blocks count that take the most time for their bytes, the last one in part. Arguments as above.
    """
    passes = of.passes_of(chain)
    if min(limits) == math.inf:
        return 0.0
    seconds = np.diff(passes.busy + passes.forward)
    fit = [
        _most_within(seconds, held, max(limit - more, 0.0))
        for (held, more), limit in zip((each[False] for each in sizes), limits, strict=True)
    ]
    without = np.concatenate(([0.0], np.cumsum(sorted(fit, reverse=True))))
    rest = np.maximum(seconds.sum() - without, 0.0)
    others = of.depth - np.arange(of.depth + 1)
    least = np.divide(rest, others, out=np.where(rest > 1e-9 * seconds.sum(), np.inf, 0.0), where=others > 0)
    return float(of.microbatches * least.min() / of.speeds.max())


def _most_within(values: Floats, sizes: Floats, limit: float) -> float:
    """Return the largest sum of values whose sizes are no more than a limit; of the last one a part counts."""
    order = np.argsort(sizes / np.maximum(values, 1e-300))
    room = np.clip(limit - (np.cumsum(sizes[order]) - sizes[order]), 0.0, None)
    parts = np.divide(room, sizes[order], out=np.ones(len(order)), where=sizes[order] > room)
    return float((values[order] * parts).sum())


def _least_sums(values: Floats) -> Floats:
    """Return the least sums of 1, 2, .. of some values."""
    return np.cumsum(np.sort(values))


def _outside(of: Candidate, chain: BlockChain, hop: float) -> Floats:
    """Return the seconds of a batch in which others run before a rank begins and after it has ended, at least.

    Every stage before it has a block; so has every one behind it, which is waited for where all forwards come first.
    Infinitely less without a flush.
    """
    if not of.method.flushes:
        return np.full(of.depth, -np.inf)
    path, fastest = of.passes_of(chain).path, float(of.speeds.max())
    hops = 2 * hop * np.arange(of.depth)
    found: Floats = path[: of.depth] / fastest + hops
    if of.method.forwards_first:
        found = found + (path[-1] - path[-of.depth :]) / fastest + hops[::-1]
    return found


def _bytes_of_blocks(of: Candidate, chain: BlockChain, rank: int, memory: RankWays) -> BlockBytes:
    """Return the bytes of each block on a rank at least, and what the rank holds more, without recompute and with it.

    Of a block the rank holds as many microbatches as of the stage that has the fewest in flight; of one block in each
    other stage, as many as of that stage; and where it recomputes, all that the backward of one block takes, as
    `CandidateMemory.foreseen` says.
    """
    stages = [stage for stage, each in enumerate(of.method.ranks(of.depth)) if each == rank]
    flights = [stage_forecast(of.method, of.depth, of.microbatches, each).activations for each in stages]
    fewest, spare, found = min(flights), chain.blocks - of.stages + 1, {}
    saved, backward = (np.diagonal(chain.sizes[kind], 1) for kind in (HeldKind.SAVED, HeldKind.BACKWARD))
    for does, each in memory.items():
        again = does is ActivationMemory.RECOMPUTED
        own = saved if again else chain.own_graphs
        more = [
            (flight - fewest) * own[stage : stage + spare].min() for stage, flight in zip(stages, flights, strict=True)
        ]
        if again and not of.method.halved:
            more.append((backward - saved)[stages[-1] : stages[-1] + spare].min())
        always = np.diagonal(each.sizes.fixed + each.sizes.kinds[HeldKind.OPTIMIZER], 1)
        found[again] = always + fewest * own, float(sum(more))
    return found
