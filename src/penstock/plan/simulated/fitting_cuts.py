"""Which cuts of a chain fit into the memory of ranks, where ranks recompute for that, and which to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.candidates.block_chain import BlockChain, Floats, between
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.candidate_bounds import CandidateBounds, RankWork, least_of_ranks, only_busy_counts
from penstock.plan.candidates.planned_methods import ActivationMemory
from penstock.plan.candidates.rank_memory import Cuts, RankWays
from penstock.plan.simulated.divided_blocks import least_divided
from penstock.plan.stages.device_hierarchy import Devices

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
        self._of, self._chain, self._memory = of, chain, memory
        self._steps, self._hop = of.updates(chain, devices), CandidateBounds(of, chain, devices).hop()
        self._limits = of.limits(devices)
        self._depth, self._blocks, self.stages = of.depth, chain.blocks, of.stages
        self._ranks = of.method.ranks(of.depth)
        self._slow = (1 / of.speeds)[:, None, None]  # of matrices of each rank
        self._on_host = [m.on_host for of_rank in memory for m in of_rank.values() if m.on_host is not None]
        self._matrices = [_matrices(each, devices.host_memory) for each in memory] if of.method.chunks == 1 else None

    def held(self, rank: int, cuts: Cuts, does: ActivationMemory) -> float:
        """Return the most bytes that a rank holds; infinite if the memory of the host has no room for the rest."""
        if self._matrices is not None:
            return float(self._matrices[rank][does][cuts[rank], cuts[rank + 1]])
        return self._memory[rank][does].at(cuts)

    def held_on_host(self, rank: int, cuts: Cuts, does: ActivationMemory) -> float:
        """Return the most bytes that a rank has in the memory of the host."""
        used = self._memory[rank][does].on_host
        return 0.0 if used is None or used.held is None else float(used.held[cuts[rank], cuts[rank + 1]])

    def activations(self, cuts: Cuts) -> tuple[ActivationMemory, ...] | None:
        """Return what each rank does with its activations; None if some rank does not fit."""
        if min(self._limits) == math.inf:
            return (ActivationMemory.KEPT,) * self._depth
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
        if self._matrices is None:
            least = least_divided(self._of, self._chain, self._limits, self._memory, self._hop)
            return None if least == math.inf or self.first is None else least
        more = self._more()
        if _slowest(more) == math.inf:
            return None
        times = least_of_ranks(self._of, self._rank_times(more), np.arange(self._depth))
        if self._copies is None:
            return _slowest(times)
        slowest = _slowest(np.maximum(times, self._with_copies(self._copies)))
        return max(slowest, self.least_copies(self._copies)) if self._known else slowest

    @cached_property
    def first(self) -> Cuts | None:
        """The cuts to begin with; None if there are none that fit, or none was found.

        If ranks have one stage each, those of which the slowest stage is fastest.
        """
        busy = self._between(self._of.passes_of(self._chain).busy)
        if self._matrices is not None:
            times = busy * self._slow + self._more()
            if self._copies is not None:
                times = np.maximum(times, self._with_copies(self._copies) / self._of.microbatches)
            return _evenest(times)
        cuts = _evenest(np.where(self._later, busy, np.inf) * self._slow[list(self._ranks)])
        assert cuts is not None, "there are as many blocks as stages, or more"
        if self.are_few():
            fit = (each for each in (cuts, *self.all()) if self.activations(each) is not None)
            cuts = next(fit, None)
        while cuts is not None and self.activations(cuts) is None:
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
            each = (min(float(m.between_cuts()[0, -1]) for m in of_rank.values()) for of_rank in self._memory)
            return sum(each) / self._depth**2
        return self._memory[0][ActivationMemory.RECOMPUTED].at(whole) / self._depth

    def _most(self, cuts: Cuts) -> float:
        """Return the bytes of the largest rank for its limit, recomputed if that takes less."""
        least = (min(self.held(r, cuts, each) for each in self._memory[r]) for r in range(self._depth))
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
        for rank, (limit, matrices) in enumerate(zip(self._limits, self._matrices, strict=True)):
            for does, held in reversed(matrices.items()):
                seconds = forward[rank] if does is ActivationMemory.RECOMPUTED else 0.0
                np.copyto(more[rank], seconds, where=self._later & (self._band(held, rank) <= limit))
        return more

    @cached_property
    def _copies(self) -> list[Floats] | None:
        """The seconds of a batch in which each rank copies activations, between cuts, if it does; None if not known."""
        return [each.copies for each in self._on_host if each.copies is not None] or None

    @cached_property
    def _known(self) -> bool:
        """Whether what ranks hold is that of a schedule, where they may offload; otherwise it may be more."""
        return all(each.held is not None for each in self._on_host)

    def _with_copies(self, seconds: Sequence[Floats]) -> Floats:
        """Return the seconds of a batch in which ranks with one stage copy activations: none if there is room for them.

        Where it is not known yet whether they fit with that, they may recompute instead, if that fits and takes less.

        Args:
            seconds: in which each rank does so otherwise, between cuts.
        """
        assert self._matrices is not None
        found, passes = [], self._of.passes_of(self._chain)
        again = self._of.microbatches * between(passes.busy + passes.forward)
        for rank, (held, limit, copies) in enumerate(zip(self._matrices, self._limits, seconds, strict=True)):
            if not self._known:
                copies = np.where(self._may_recompute(rank), np.minimum(copies, again), copies)
            found.append(self._band(np.where(self._only_moved(held, limit), copies, 0.0), rank))
        return np.array(found)

    def _may_recompute(self, rank: int) -> npt.NDArray[np.bool_]:
        """Return where a rank may recompute though it moves activations if it can, as far as is known before that."""
        use = self._memory[rank][ActivationMemory.OFFLOADED].on_host
        assert self._matrices is not None
        assert use is not None
        assert use.has_room is not None
        fits: npt.NDArray[np.bool_] = self._matrices[rank][ActivationMemory.RECOMPUTED] <= self._limits[rank]
        return fits & ~use.has_room

    @staticmethod
    def _only_moved(held: Mapping[ActivationMemory, Floats], limit: float) -> npt.NDArray[np.bool_]:
        """Return where a rank has room only if it moves activations, as far as what it holds then is known."""
        found = held[ActivationMemory.KEPT] > limit
        return found & (held.get(ActivationMemory.OFFLOADED, 0.0) <= limit)

    def _rank_times(self, more: Floats) -> RankWork:
        """Return the times of ranks with one stage from begin to end, given what recompute takes."""
        passes = self._of.passes_of(self._chain)
        forward = self._between(passes.forward) * self._slow
        busy = self._between(passes.busy) * self._slow + more
        path = self._between(passes.path) * self._slow + more
        step = self._between(self._steps) * self._slow
        before, behind = np.zeros((2, *busy.shape[:2]))
        if only_busy_counts(self._of):
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

    def least_copies(self, copies: Sequence[Floats]) -> float:
        """Return the seconds that copies of a batch take at least if some rank moves activations only for their room.

        Infinite if none does.

        Args:
            copies: seconds of a batch in which each rank copies activations, between cuts.
        """
        assert self._matrices is not None, "methods whose ranks have several stages move nothing"
        least = math.inf
        for held, limit, seconds in zip(self._matrices, self._limits, copies, strict=True):
            least = min(least, float(seconds[np.triu(self._only_moved(held, limit), 1)].min(initial=math.inf)))
        return least


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


def _matrices(memory: RankWays, on_host: float | None) -> dict[ActivationMemory, Floats]:
    """Return the bytes of a rank between cuts, by what it does; infinite where the host has no room for the rest."""
    found = {does: each.between_cuts() for does, each in memory.items()}
    for does, each in memory.items():
        if on_host is not None and each.on_host is not None and each.on_host.held is not None:
            found[does] = np.where(each.on_host.held > on_host, np.inf, found[does])
    return found
