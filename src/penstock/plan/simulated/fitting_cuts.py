"""Which cuts of a chain fit into the memory of ranks, where ranks recompute for that, and which to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.plan.simulated.block_chain import BlockChain, Floats, between
from penstock.plan.simulated.candidate import Candidate, RankWork
from penstock.plan.simulated.planned_methods import stage_forecast
from penstock.plan.simulated.schedule_cache import Moment
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import AlwaysThere

MOST_CUTS = 256
"""That are all tried."""

Cuts: TypeAlias = tuple[int, ...]
"""Where stages begin, and where the last one ends."""

_DIVIDED = (HeldKind.OPTIMIZER, HeldKind.SCRATCH)  # by parallel pipelines that shard
_PIECES = 3  # of an optimizer's state that is away: in use, on its way, leaving


class StageSizes:
    """What a stage takes between two cuts: always, and of each kind.

    Attributes:
        fixed: bytes that are always there.
        kinds: bytes of each kind of what comes and goes.

    Args:
        chain: of blocks.
        there: weights and gradients that are always there.
        of: what is cut.
    """

    def __init__(self, chain: BlockChain, there: AlwaysThere, of: Candidate) -> None:
        shards, low, full = of.shards, chain.low_precision, of.sharding == "full"
        self.fixed: Floats = (
            chain.frozen + there.versions * chain.buffer + (there.whole + there.rows / shards) * chain.whole
        )
        self.kinds = {**chain.sizes, **{kind: chain.sizes[kind] / shards for kind in _DIVIDED}}
        if of.away:
            self.kinds[HeldKind.OPTIMIZER] = np.minimum(self.kinds[HeldKind.OPTIMIZER], _PIECES * chain.pieces)
        self.kinds[HeldKind.WHOLE] = chain.whole + low * chain.buffer if full else there.rows * chain.whole
        self.kinds |= {HeldKind.GATHERED: chain.buffer, HeldKind.FULL_GRADIENT: chain.whole}
        self.kinds |= {HeldKind.SUM: low * chain.whole / shards, HeldKind.OLDER: low * chain.buffer / shards}


class RankMemory:
    """The most bytes of one rank.

    Attributes:
        sizes: of each of its stages.

    Args:
        stages: that it has.
        sizes: of each of them.
        moments: what it holds at each moment that counts.
    """

    def __init__(self, stages: Sequence[int], sizes: StageSizes, moments: Sequence[Moment]) -> None:
        self._stages, self._fixed, self.sizes = stages, sizes.fixed, sizes
        kinds = sorted({key for each in moments for key in each})
        self._counts = np.array([[each.get(key, 0.0) for key in kinds] for each in moments])
        self._sizes = [(stage, sizes.kinds[kind]) for stage, kind in kinds]
        self._known: dict[tuple[tuple[int, int], ...], float] = {}  # bytes, by where its stages begin and end

    def between_cuts(self) -> Floats:
        """Return the bytes of a rank with one stage, between each cut and each later one."""
        most = np.zeros(self._fixed.shape)
        for counts in self._counts:
            found = np.zeros(most.shape)
            for count, (_, size) in zip(counts, self._sizes, strict=True):
                if count:
                    found += count * size
            np.maximum(most, found, out=most)
        total: Floats = self._fixed + most
        return total

    def at(self, cuts: Cuts) -> float:
        """Return the bytes with cuts."""
        own = tuple([(cuts[stage], cuts[stage + 1]) for stage in self._stages])
        if own not in self._known:  # most cuts that are tried differ from others in few ranks
            sizes = np.array([size[cuts[stage], cuts[stage + 1]] for stage, size in self._sizes])
            fixed = sum(self._fixed[each] for each in own)
            self._known[own] = float(fixed + (self._counts @ sizes).max(initial=0.0))
        return self._known[own]


class FirstCuts(NamedTuple):
    """Cuts, and what all that fit take at least.

    Attributes:
        cuts: of which the slowest stage is fastest, if ranks have one stage each.
        batch: seconds of a batch at least, without sums; 0 if unknown.
    """

    cuts: Cuts
    batch: float


class FittingCuts:
    """The cuts that fit, if each rank recomputes all of its stages or, where these fit as they are, none.

    Args:
        of: what is cut.
        chain: its blocks.
        steps: seconds of updates of the first 0, 1, .. of them.
        hop: seconds of a message between ranks at least.
        limits: bytes of each rank; may be infinite.
        memory: of each rank, without recompute and with it.
    """

    def __init__(
        self,
        of: Candidate,
        chain: BlockChain,
        steps: Floats,
        hop: float,
        limits: Sequence[float],
        memory: Sequence[tuple[RankMemory, RankMemory]],
    ) -> None:
        self._of, self._chain, self._steps, self._hop = of, chain, steps, hop
        self._limits, self._memory = limits, memory
        self._depth, self._blocks, self.stages = of.depth, chain.blocks, of.stages
        self._ranks = of.method.ranks(of.depth)
        self._slow = (1 / of.speeds)[:, None, None]  # of matrices of each rank
        self._matrices = [_matrices(*both) for both in memory] if of.method.chunks == 1 else None

    def held(self, rank: int, cuts: Cuts, again: bool) -> float:
        """Return the most bytes that a rank holds."""
        if self._matrices is not None:
            return float(self._matrices[rank][again][cuts[rank], cuts[rank + 1]])
        return self._memory[rank][again].at(cuts)

    def recomputes(self, cuts: Cuts) -> tuple[bool, ...] | None:
        """Return whether each rank recomputes, only where it must; None if some rank does not fit."""
        if min(self._limits) == math.inf:
            return (False,) * self._depth
        found = []
        for rank, limit in enumerate(self._limits):
            again = self.held(rank, cuts, again=False) > limit
            if again and self.held(rank, cuts, again=True) > limit:
                return None
            found.append(again)
        return tuple(found)

    @cached_property
    def first(self) -> FirstCuts | None:
        """The cuts to begin with; None if there are none that fit, or none was found."""
        if self._matrices is not None:
            times = self._rank_times(self._matrices)
            found = self._evenest(times.busy)
            return None if found is None else FirstCuts(found, self._least_batch(times))
        later = np.triu(np.ones((self._blocks + 1,) * 2, dtype=bool), 1)
        busy = np.where(later, between(self._of.passes_of(self._chain).busy), np.inf)
        cuts = self._evenest(busy * self._slow[list(self._ranks)])
        assert cuts is not None, "there are as many blocks as stages, or more"
        if self.are_few():
            fit = (each for each in (cuts, *self.all()) if self.recomputes(each) is not None)
            cuts = next(fit, None)
        while cuts is not None and self.recomputes(cuts) is None:
            most, better = min((self._most(each), each) for each in (cuts, *self.near(cuts)))
            cuts = better if most < self._most(cuts) else None
        return None if cuts is None else FirstCuts(cuts, self._least_recomputed())

    def are_few(self) -> bool:
        """Return whether all cuts are to be tried."""
        return math.comb(self._blocks - 1, self.stages - 1) <= MOST_CUTS

    def all(self) -> Iterator[Cuts]:
        """Return all cuts."""
        inner = combinations(range(1, self._blocks), self.stages - 1)
        return ((0, *each, self._blocks) for each in inner)

    def near(self, cuts: Cuts) -> Iterator[Cuts]:
        """Return cuts with one end moved by a block."""
        for at, step in product(range(1, self.stages), (-1, 1)):
            moved = (*cuts[:at], cuts[at] + step, *cuts[at + 1 :])
            if moved[at - 1] < moved[at] < moved[at + 1]:
                yield moved

    def least(self) -> float:
        """Return the bytes of a device on average, at least."""
        whole = (0, *[self._blocks] * self.stages)
        if self._matrices is not None:
            return sum(float(min(m[0, -1] for m in both)) for both in self._matrices) / self._depth**2
        return self._memory[0][True].at(whole) / self._depth

    def _most(self, cuts: Cuts) -> float:
        """Return the bytes of the largest rank for its limit, recomputed if that takes less."""
        least = (min(self.held(r, cuts, again) for again in (False, True)) for r in range(self._depth))
        return max(held * (max(self._limits) / limit) for held, limit in zip(least, self._limits, strict=True))

    def _rank_times(self, matrices: Sequence[tuple[Floats, Floats]]) -> RankWork:
        """Return the times of ranks with one stage from each cut to each later one; infinite where it does not fit."""
        passes, later = self._of.passes_of(self._chain), np.triu(np.ones((self._blocks + 1,) * 2, dtype=bool), 1)
        limits = np.array(self._limits)[:, None, None]
        plain, again = (np.array([each[n] for each in matrices]) <= limits for n in (0, 1))
        forward = between(passes.forward) * self._slow
        more = np.where(later, np.where(plain, 0.0, np.where(again, forward, np.inf)), np.inf)
        busy, path = between(passes.busy) * self._slow + more, between(passes.path) * self._slow + more
        step = between(self._steps) * self._slow
        before, behind = np.zeros((2, *busy.shape[:2]))
        so_far = (path[0] + step[0])[0]  # others wait for the first update, too
        for rank in range(1, self._depth):
            before[rank] = so_far + 2 * rank * self._hop
            so_far = (so_far[:, None] + path[rank]).min(axis=0)
        rest = np.where(np.arange(self._blocks + 1) < self._blocks, np.inf, 0.0)
        for rank in reversed(range(self._depth)):
            behind[rank] = rest + 2 * (self._depth - 1 - rank) * self._hop
            rest = (path[rank] + rest).min(axis=1)
        through = path + behind[:, None, :]
        return RankWork(busy, path, forward, step, before[:, :, None], through, behind[:, None, :])

    def _least_recomputed(self) -> float:
        """Return the seconds that a batch takes at least where ranks have several stages, whatever their cuts are.

        A rank that recomputes nothing has no more blocks than fit, and the others run the rest, with two forwards. Of
        each the blocks count that take the most time for their bytes, the last one in part.
        """
        of, passes = self._of, self._of.passes_of(self._chain)
        if min(self._limits) == math.inf:
            return 0.0
        seconds, fit = np.diff(passes.busy + passes.forward), []
        for rank, (plain, _) in enumerate(self._memory):
            flight = min(
                stage_forecast(of.method, of.depth, of.microbatches, stage).activations
                for stage in range(of.stages)
                if self._ranks[stage] == rank
            )
            sizes = np.diagonal(plain.sizes.fixed + plain.sizes.kinds[HeldKind.OPTIMIZER], 1)
            fit.append(_most_within(seconds, sizes + flight * self._chain.own_graphs, self._limits[rank]))
        without = np.concatenate(([0.0], np.cumsum(sorted(fit, reverse=True))))
        rest = np.maximum(seconds.sum() - without, 0.0)
        others = of.depth - np.arange(of.depth + 1)
        least = np.divide(rest, others, out=np.where(rest > 1e-9 * seconds.sum(), np.inf, 0.0), where=others > 0)
        return float(of.microbatches * least.min() / of.speeds.max())

    def _least_batch(self, times: RankWork) -> float:
        """Return the seconds that a batch takes at least without sums, with whatever cuts of ranks with one stage."""
        reached = np.where(np.arange(self._blocks + 1) > 0, np.inf, 0.0)
        for rank in self._of.of_ranks(times, np.arange(self._depth)):
            reached = np.maximum(reached[:, None], rank).min(axis=0)
        return float(reached[-1])

    def _evenest(self, times: Floats) -> Cuts | None:
        """Return the cuts of which the slowest stage is fastest; None if no cuts fit."""
        reached = np.where(np.arange(self._blocks + 1) > 0, np.inf, 0.0)
        trail = []
        for stage in times:
            through = np.maximum(reached[:, None], stage)
            trail.append(through.argmin(axis=0))
            reached = through.min(axis=0)
        if not math.isfinite(reached[-1]):
            return None
        cuts = [self._blocks]
        for from_ in reversed(trail):
            cuts.append(int(from_[cuts[-1]]))
        return tuple(reversed(cuts))


def _most_within(values: Floats, sizes: Floats, limit: float) -> float:
    """Return the largest sum of values whose sizes are no more than a limit; of the last one a part counts."""
    order = np.argsort(sizes / np.maximum(values, 1e-300))
    room = np.clip(limit - (np.cumsum(sizes[order]) - sizes[order]), 0.0, None)
    parts = np.divide(room, sizes[order], out=np.ones(len(order)), where=sizes[order] > room)
    return float((values[order] * parts).sum())


def _matrices(plain: RankMemory, again: RankMemory) -> tuple[Floats, Floats]:
    """Return the bytes of a rank between cuts, without recompute and with it."""
    found = plain.between_cuts()
    return found, found if again is plain else again.between_cuts()
