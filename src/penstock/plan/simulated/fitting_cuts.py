"""Which cuts of a chain fit into the memory of ranks, where ranks recompute for that, and which to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from penstock.plan.simulated.block_chain import Floats, PassSums, between
from penstock.plan.simulated.planned_methods import PlannedMethod
from penstock.plan.simulated.rank_memory import Cuts, RankMemory

MOST_CUTS = 256
"""That are all tried."""


class FirstCuts(NamedTuple):
    """Cuts, and what those that fit take at least.

    Attributes:
        cuts: of which the slowest stage is fastest, if ranks have one stage each.
        slowest: seconds of a microbatch on the slowest stage; 0 if unknown.
        total: on all stages together.
    """

    cuts: Cuts
    slowest: float
    total: float


class FittingCuts:
    """The cuts that fit, if each rank recomputes all of its stages or, where these fit as they are, none.

    Args:
        passes: of a microbatch.
        method: which stages ranks have.
        depth: how many ranks.
        limit: bytes of a rank; may be infinite.
        memory: of each rank, without recompute and with it.
    """

    def __init__(
        self,
        passes: PassSums,
        method: PlannedMethod,
        depth: int,
        limit: float,
        memory: Sequence[tuple[RankMemory, RankMemory]],
    ) -> None:
        self._passes, self._depth, self._limit, self._memory = passes, depth, limit, memory
        self._blocks, self.stages = len(passes.forward) - 1, depth * method.chunks
        later = np.triu(np.ones((self._blocks + 1,) * 2, dtype=bool), 1)
        self._busy, self._twice = (
            np.where(later, between(sums), np.inf) for sums in (passes.busy, passes.busy + passes.forward)
        )
        alone = method.chunks == 1
        self._matrices = [tuple(each.between_cuts() for each in both) for both in memory] if alone else None

    def held(self, rank: int, cuts: Cuts, again: bool) -> float:
        """Return the most bytes that a rank holds."""
        if self._matrices is not None:
            return float(self._matrices[rank][again][cuts[rank], cuts[rank + 1]])
        return self._memory[rank][again].at(cuts)

    def recomputes(self, cuts: Cuts) -> tuple[bool, ...] | None:
        """Return whether each rank recomputes, only where it must; None if some rank does not fit."""
        if self._limit == math.inf:
            return (False,) * self._depth
        found = []
        for rank in range(self._depth):
            again = self.held(rank, cuts, again=False) > self._limit
            if again and self.held(rank, cuts, again=True) > self._limit:
                return None
            found.append(again)
        return tuple(found)

    def first(self) -> FirstCuts | None:
        """Return the cuts to begin with; None if there are none that fit, or none was found."""
        if self._matrices is not None:
            return self._best_slowest([self._times(plain, again) for plain, again in self._matrices])
        found = self._best_slowest([self._busy] * self.stages)
        assert found is not None, "there are as many blocks as stages, or more"
        cuts: Cuts | None = found.cuts
        if self.are_few():
            fit = (each for each in (found.cuts, *self.all()) if self.recomputes(each) is not None)
            cuts = next(fit, None)
        while cuts is not None and self.recomputes(cuts) is None:
            most, better = min((self._most(each), each) for each in (cuts, *self.near(cuts)))
            cuts = better if most < self._most(cuts) else None
        return None if cuts is None else FirstCuts(cuts, 0.0, float(self._passes.busy[-1]))

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
        """Return the bytes of the largest rank, recomputed if that takes less."""
        return max(min(self.held(r, cuts, again) for again in (False, True)) for r in range(self._depth))

    def _times(self, plain: Floats, again: Floats) -> Floats:
        """Return the seconds of a stage between two cuts; infinite where it does not fit."""
        times: Floats = np.where(plain <= self._limit, self._busy, np.where(again <= self._limit, self._twice, np.inf))
        return times

    def _best_slowest(self, times: Sequence[Floats]) -> FirstCuts | None:
        """Return the cuts of which the slowest stage is fastest; None if no cuts fit."""
        reached, total = np.full(self._blocks + 1, np.inf), np.full(self._blocks + 1, np.inf)
        reached[0] = total[0] = 0.0
        trail = []
        for stage in times:
            through = np.maximum(reached[:, None], stage)
            trail.append(through.argmin(axis=0))
            reached, total = through.min(axis=0), (total[:, None] + stage).min(axis=0)
        if not math.isfinite(reached[-1]):
            return None
        cuts = [self._blocks]
        for from_ in reversed(trail):
            cuts.append(int(from_[cuts[-1]]))
        return FirstCuts(tuple(reversed(cuts)), float(reached[-1]), float(total[-1]))
