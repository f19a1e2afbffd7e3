"""Which cuts of a chain fit into the memory of ranks, where ranks recompute for that, and which to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from penstock.plan.candidates.block_chain import BlockChain, Floats
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.candidate_bounds import CandidateBounds
from penstock.plan.candidates.planned_methods import ActivationMemory
from penstock.plan.candidates.rank_memory import Cuts, RankWays
from penstock.plan.simulated.divided_blocks import least_divided
from penstock.plan.simulated.one_stage_ranks import OneStageRanks, bands_of, ends_later, evenest_cuts
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.layer_row import near_cuts

MOST_CUTS = 256
"""That are all tried."""


class TimedCuts(NamedTuple):
    """Cuts that fit.

    Attributes:
        cuts: where stages begin, and where the last one ends.
        activations: what each rank does with them.
        batch: seconds of one more batch of a long run.
        seconds: of it per sample.
    """

    cuts: Cuts
    activations: tuple[ActivationMemory, ...]
    batch: float
    seconds: float


class LeastMemory(NamedTuple):
    """With how much memory ranks have room.

    Attributes:
        nbytes: of each device.
        kinds: of the rank that takes the most, bytes by kind.
    """

    nbytes: float
    kinds: Mapping[str, float]


def place_of(seconds: float, activations: Sequence[ActivationMemory], away: bool = False) -> tuple[float, int]:
    """Return what plans are ordered by: their time but for rounding, then how many ranks recompute or move something.

    Args:
        seconds: of the plan.
        activations: what each rank does with them.
        away: all ranks have optimizer states in the memory of the host.
    """
    more = len(activations) * away + sum(each is not ActivationMemory.KEPT for each in activations)
    return float(f"{seconds:.9g}"), more


class FittingCuts:
    """The cuts that fit, if each rank does with its activations the first of several things with which it fits.

    Args:
        of: what is cut.
        chain: its blocks.
        devices: to plan for.
        memory: of each rank.
    """

    def __init__(self, of: Candidate, chain: BlockChain, devices: Devices, memory: Sequence[RankWays]) -> None:
        self._of, self._chain, self._devices, self._memory = of, chain, devices, memory
        self._limits = of.limits(devices)
        self._one_each = OneStageRanks(of, chain, devices, memory) if of.method.chunks == 1 else None

    def held(self, rank: int, cuts: Cuts, does: ActivationMemory) -> float:
        """Return the most bytes that a rank holds; infinite if the memory of the host has no room for the rest."""
        if self._one_each is not None:
            return float(self._one_each.held[rank][does][cuts[rank], cuts[rank + 1]])
        return self._memory[rank][does].at(cuts)

    def held_by_kind(self, rank: int, cuts: Cuts, does: ActivationMemory) -> dict[str, float]:
        """Return the bytes of a rank by kind, at the moment at which it holds the most."""
        return self._memory[rank][does].by_kind(cuts)

    def held_on_host(self, rank: int, cuts: Cuts, does: ActivationMemory) -> float:
        """Return the most bytes that a rank has in the memory of the host."""
        used = self._memory[rank][does].on_host
        return 0.0 if used is None or used.held is None else float(used.held[cuts[rank], cuts[rank + 1]])

    def activations(self, cuts: Cuts) -> tuple[ActivationMemory, ...] | None:
        """Return what each rank does with its activations; None if some rank does not fit."""
        if min(self._limits) == math.inf:
            return (ActivationMemory.KEPT,) * self._of.depth
        found = []
        for rank, limit in enumerate(self._limits):
            does = next((each for each in self._memory[rank] if self.held(rank, cuts, each) <= limit), None)
            if does is None:
                return None
            found.append(does)
        return tuple(found)

    @cached_property
    def least_batch(self) -> float | None:
        """The seconds that a batch takes at least, without sums, with cuts that fit; None if no such cuts are known.

        Infinite if ranks may offload and none has to, as the same plan is there without that.
        """
        if self._one_each is not None:
            return self._one_each.least_batch()
        hop = CandidateBounds(self._of, self._chain, self._devices).hop()
        least = least_divided(self._of, self._chain, self._limits, self._memory, hop)
        return None if least == math.inf or self.first is None else least

    def least_copies(self, copies: Sequence[Floats]) -> float:
        """Return the seconds that copies of a batch take at least, as `OneStageRanks` says."""
        assert self._one_each is not None, "methods whose ranks have several stages move nothing"
        return self._one_each.least_copies(copies)

    @cached_property
    def first(self) -> Cuts | None:
        """The cuts to begin with; None if there are none that fit, or none was found.

        If ranks have one stage each, those of which the slowest stage is fastest.
        """
        if self._one_each is not None:
            return self._one_each.evenest()
        of, blocks = self._of, self._chain.blocks
        busy, slow = bands_of(of.passes_of(self._chain).busy, of.stages), 1 / of.speeds[list(of.method.ranks(of.depth))]
        cuts = evenest_cuts(np.where(ends_later(blocks, of.stages), busy, np.inf) * slow[:, None, None])
        assert cuts is not None, "there are as many blocks as stages, or more"
        if self.are_few():
            fit = (each for each in (cuts, *self.all()) if self.activations(each) is not None)
            cuts = next(fit, None)
        while cuts is not None and self.activations(cuts) is None:
            most, better = min((self._most(each), each) for each in (cuts, *near_cuts(cuts)))
            cuts = better if most < self._most(cuts) else None
        return cuts

    def are_few(self) -> bool:
        """Return whether all cuts are to be tried."""
        return math.comb(self._chain.blocks - 1, self._of.stages - 1) <= MOST_CUTS

    def all(self) -> Iterator[Cuts]:
        inner = combinations(range(1, self._chain.blocks), self._of.stages - 1)
        return ((0, *each, self._chain.blocks) for each in inner)

    def least(self) -> float:
        """Return the bytes of a device on average, at least."""
        if self._one_each is not None:
            return self._one_each.least_held()
        whole = (0, *[self._chain.blocks] * self._of.stages)
        return self._memory[0][ActivationMemory.RECOMPUTED].at(whole) / self._of.depth

    def least_memory(self) -> LeastMemory | None:
        """Return with how much memory there are cuts that fit: the least, or if ranks have several stages, near it.

        None if the memory of the host has no room.
        """
        cuts = self._emptiest()
        if cuts is None:
            return None
        least = [
            min((self.held(rank, cuts, does), does) for does in of_rank) for rank, of_rank in enumerate(self._memory)
        ]
        rank = max(range(self._of.depth), key=lambda r: least[r][0])
        nbytes, does = least[rank]
        return LeastMemory(nbytes, self.held_by_kind(rank, cuts, does))

    def _emptiest(self) -> Cuts | None:
        """Return the cuts whose fullest device holds the least; if ranks have several stages, found step by step."""
        of, blocks = self._of, self._chain.blocks
        if self._one_each is not None:
            return self._one_each.emptiest()
        found = evenest_cuts(
            bands_of(of.passes_of(self._chain).busy, of.stages) + np.where(ends_later(blocks, of.stages), 0.0, np.inf)
        )
        assert found is not None, "there are as many blocks as stages, or more"
        while (better := min((self._most(each), each) for each in (found, *near_cuts(found)))[1]) != found:
            found = better
        return found

    def _most(self, cuts: Cuts) -> float:
        """Return the bytes of the largest rank for its limit, recomputed if that takes less."""
        least = (min(self.held(r, cuts, each) for each in self._memory[r]) for r in range(self._of.depth))
        return max(held * (max(self._limits) / limit) for held, limit in zip(least, self._limits, strict=True))
