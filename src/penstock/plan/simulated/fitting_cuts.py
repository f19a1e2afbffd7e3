"""Which cuts of a chain fit into the memory of ranks, where ranks recompute for that, and which to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from penstock.plan.simulated.block_chain import BlockChain, Floats, between
from penstock.plan.simulated.candidate import Candidate, RankWork
from penstock.plan.simulated.planned_methods import stage_forecast
from penstock.plan.simulated.rank_memory import Cuts, RankMemory
from penstock.simulate.memory.held import HeldKind

MOST_CUTS = 256
"""That are all tried."""


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
    def least_batch(self) -> float | None:
        """The seconds that a batch takes at least, without sums, with cuts that fit; None if no such cuts are known."""
        if self._matrices is None:
            return None if self.first is None else self._least_recomputed()
        more = self._more()
        if _slowest(more) == math.inf:
            return None
        return _slowest(self._of.of_ranks(self._rank_times(more), np.arange(self._depth)))

    @cached_property
    def first(self) -> Cuts | None:
        """The cuts to begin with; None if there are none that fit, or none was found.

        If ranks have one stage each, those of which the slowest stage is fastest.
        """
        busy = self._between(self._of.passes_of(self._chain).busy)
        if self._matrices is not None:
            return _evenest(busy * self._slow + self._more())
        cuts = _evenest(np.where(self._later, busy, np.inf) * self._slow[list(self._ranks)])
        assert cuts is not None, "there are as many blocks as stages, or more"
        if self.are_few():
            fit = (each for each in (cuts, *self.all()) if self.recomputes(each) is not None)
            cuts = next(fit, None)
        while cuts is not None and self.recomputes(cuts) is None:
            most, better = min((self._most(each), each) for each in (cuts, *self.near(cuts)))
            cuts = better if most < self._most(cuts) else None
        return cuts

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

    def _band(self, matrix: Floats, stage: int) -> Floats:
        """Return the part of a matrix from cut to cut that a stage can have, as each has a block: from its first begin.

        So numbers of begins and ends of all stages count from 0, and the ends of a stage are begins of the next one.
        """
        size = self._blocks - self.stages + 1
        return matrix[stage : stage + size, stage + 1 : stage + 1 + size]

    def _between(self, sums: Floats) -> Floats:
        """Return sums between cuts, of each stage, where devices are as fast as the profile."""
        whole = between(sums)
        return np.array([self._band(whole, stage) for stage in range(self.stages)])

    @cached_property
    def _later(self) -> npt.NDArray[np.bool_]:
        """Whether an end comes behind a begin."""
        return np.triu(np.ones((self._blocks - self.stages + 1,) * 2, dtype=bool))

    def _more(self) -> Floats:
        """Return the seconds that recompute takes of ranks with one stage; infinite where it does not fit."""
        assert self._matrices is not None
        forward = self._between(self._of.passes_of(self._chain).forward) * self._slow
        more = np.full(forward.shape, np.inf)
        for rank, (limit, (plain, again)) in enumerate(zip(self._limits, self._matrices, strict=True)):
            np.copyto(more[rank], forward[rank], where=self._later & (self._band(again, rank) <= limit))
            more[rank][self._later & (self._band(plain, rank) <= limit)] = 0.0
        return more

    def _rank_times(self, more: Floats) -> RankWork:
        """Return the times of ranks with one stage from begin to end, given what recompute takes."""
        passes = self._of.passes_of(self._chain)
        forward = self._between(passes.forward) * self._slow
        busy = self._between(passes.busy) * self._slow + more
        path = self._between(passes.path) * self._slow + more
        step = self._between(self._steps) * self._slow
        before, behind = np.zeros((2, *busy.shape[:2]))
        if self._of.only_busy:
            return RankWork(busy, path, forward, step, before[:, :, None], path, behind[:, None, :])
        so_far = (path[0] + step[0])[0]  # others wait for the first update, too
        for rank in range(1, self._depth):
            before[rank] = so_far + 2 * rank * self._hop
            so_far = (so_far[:, None] + path[rank]).min(axis=0)
        rest = np.where(np.arange(busy.shape[1]) < busy.shape[1] - 1, np.inf, 0.0)
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
        stages = [stage_forecast(of.method, of.depth, of.microbatches, n).activations for n in range(of.stages)]
        for rank, (plain, _) in enumerate(self._memory):
            flight = min(held for of_rank, held in zip(self._ranks, stages, strict=True) if of_rank == rank)
            sizes = np.diagonal(plain.sizes.fixed + plain.sizes.kinds[HeldKind.OPTIMIZER], 1)
            fit.append(_most_within(seconds, sizes + flight * self._chain.own_graphs, self._limits[rank]))
        without = np.concatenate(([0.0], np.cumsum(sorted(fit, reverse=True))))
        rest = np.maximum(seconds.sum() - without, 0.0)
        others = of.depth - np.arange(of.depth + 1)
        least = np.divide(rest, others, out=np.where(rest > 1e-9 * seconds.sum(), np.inf, 0.0), where=others > 0)
        return float(of.microbatches * least.min() / of.speeds.max())


def _slowest(times: Floats) -> float:
    """Return the time of the slowest stage, with the cuts with which it is least, from times of stages in bands."""
    reached = np.where(np.arange(times.shape[1]) > 0, np.inf, 0.0)
    for stage in times:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def _evenest(times: Floats) -> Cuts | None:
    """Return the cuts of which the slowest stage is fastest, from times of stages in bands; None if no cuts fit."""
    reached = np.where(np.arange(times.shape[1]) > 0, np.inf, 0.0)
    trail = []
    for stage in times:
        through = np.maximum(reached[:, None], stage)
        trail.append(through.argmin(axis=0))
        reached = through.min(axis=0)
    if not math.isfinite(reached[-1]):
        return None
    places = [len(reached) - 1]
    for from_ in reversed(trail):
        places.append(int(from_[places[-1]]))
    return tuple(stage + place for stage, place in enumerate(reversed(places)))


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
