"""Which cuts fit where ranks have one stage each, and the least that a batch takes: all cuts at once, as matrices.

`penstock.plan.simulated.divided_blocks` says the same of ranks with several stages, of which less is known.

Each stage has a block, so the first begin of a stage, and its first end, come a block after those of the stage before.
Its band is the part of a matrix from cut to cut that it can have: begins and ends count from 0 there, and the ends of a
stage are begins of the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.plan.candidates.block_chain import BlockChain, Floats
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.candidate_bounds import CandidateBounds, RankWork, least_of_ranks, only_busy_counts
from penstock.plan.candidates.planned_methods import ActivationMemory
from penstock.plan.candidates.rank_memory import Cuts, RankWays
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.layer_row import CutProgram, between


def band_of(matrix: Floats, stage: int, stages: int) -> Floats:
    """Return the band of one of some stages."""
    size = len(matrix) - stages
    return matrix[stage : stage + size, stage + 1 : stage + 1 + size]


def bands_of(sums: Floats, stages: int) -> Floats:
    """Return sums between cuts, of each stage, where devices are as fast as the profile."""
    whole = between(sums)
    return np.array([band_of(whole, stage, stages) for stage in range(stages)])


def ends_later(blocks: int, stages: int) -> npt.NDArray[np.bool_]:
    """Return whether an end comes behind a begin, in a band."""
    return np.triu(np.ones((blocks - stages + 1,) * 2, dtype=bool))


def slowest_of(times: Floats) -> float:
    """Return the time of the slowest stage, with the cuts with which it is least, from times of stages in bands."""
    reached = np.where(np.arange(times.shape[1]) > 0, np.inf, 0.0)
    for stage in times:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def evenest_cuts(times: Floats) -> Cuts | None:
    """Return the cuts of which the slowest stage is fastest, from times of stages in bands; None if no cuts fit."""
    program = CutProgram(times.shape[1])
    for stage in times:
        program.add_stage_anyhow(stage)
    if not math.isfinite(program.least[()][-1]):
        return None
    return tuple(stage + place for stage, place in enumerate(program.trace(())[0]))


class OneStageRanks:
    """Ranks with one stage each: the bytes and seconds of each between any two cuts.

    Attributes:
        held: the most bytes of each rank, by what it does; infinite where the host has no room for the rest.

    Args:
        of: what is cut.
        chain: its blocks.
        devices: to plan for.
        memory: of each rank.
    """

    def __init__(self, of: Candidate, chain: BlockChain, devices: Devices, memory: Sequence[RankWays]) -> None:
        self._of, self._chain, self._memory = of, chain, memory
        self._steps, self._hop = of.updates(chain, devices), CandidateBounds(of, chain, devices).hop()
        self._update, self._limits = devices.update, of.limits(devices)
        self._slow = (1 / of.speeds)[:, None, None]  # of matrices of each rank
        self._on_host = [m.on_host for of_rank in memory for m in of_rank.values() if m.on_host is not None]
        self.held = [_matrices(each, devices.host_memory) for each in memory]

    def least_batch(self) -> float | None:
        """Return the seconds that a batch takes at least, without sums, with cuts that fit; None if none do.

        Infinite if ranks may offload and none has to.
        """
        more = self._more()
        if slowest_of(more) == math.inf:
            return None
        times = least_of_ranks(self._of, self._rank_times(more), np.arange(self._of.depth))
        if self._copies is None:
            return slowest_of(times)
        slowest = slowest_of(np.maximum(times, self._with_copies(self._copies)))
        return max(slowest, self.least_copies(self._copies)) if self._known else slowest

    def evenest(self) -> Cuts | None:
        """Return the cuts that fit of which the slowest stage is fastest; None if none fit."""
        times = self._bands(self._of.passes_of(self._chain).busy) * self._slow + self._more()
        if self._copies is not None:
            times = np.maximum(times, self._with_copies(self._copies) / self._of.microbatches)
        return evenest_cuts(times)

    def emptiest(self) -> Cuts | None:
        """Return the cuts whose fullest device holds the least, if each rank does what takes the least.

        None if the memory of the host has no room for what they have there, however blocks are cut.
        """
        later, rows = ends_later(self._chain.blocks, self._of.depth), list[Floats]()
        for rank, matrices in enumerate(self.held):
            least: Floats = np.minimum.reduce(list(matrices.values()))
            rows.append(np.where(later, self._band(least, rank), np.inf))
        return evenest_cuts(np.array(rows))

    def least_held(self) -> float:
        """Return the bytes of a device on average, at least."""
        each = (min(float(m.between_cuts()[0, -1]) for m in of_rank.values()) for of_rank in self._memory)
        return sum(each) / self._of.depth**2

    def least_copies(self, copies: Sequence[Floats]) -> float:
        """Return the seconds that copies of a batch take at least if some rank moves activations only for their room.

        Infinite if none does.

        Args:
            copies: seconds of a batch in which each rank copies activations, between cuts.
        """
        least = math.inf
        for held, limit, seconds in zip(self.held, self._limits, copies, strict=True):
            least = min(least, float(seconds[np.triu(self._only_moved(held, limit), 1)].min(initial=math.inf)))
        return least

    def _band(self, matrix: Floats, rank: int) -> Floats:
        return band_of(matrix, rank, self._of.depth)

    def _bands(self, sums: Floats) -> Floats:
        return bands_of(sums, self._of.depth)

    def _more(self) -> Floats:
        """Return the seconds that recompute takes of each rank; infinite where it does not fit."""
        forward = self._bands(self._of.passes_of(self._chain).forward) * self._slow
        more, later = np.full(forward.shape, np.inf), ends_later(self._chain.blocks, self._of.depth)
        for rank, (limit, matrices) in enumerate(zip(self._limits, self.held, strict=True)):
            for does, held in reversed(matrices.items()):
                seconds = forward[rank] if does is ActivationMemory.RECOMPUTED else 0.0
                np.copyto(more[rank], seconds, where=later & (self._band(held, rank) <= limit))
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
        """Return the seconds of a batch in which ranks copy activations: none if there is room for them.

        Where it is not known yet whether they fit with that, they may recompute instead, if that fits and takes less.

        Args:
            seconds: in which each rank does so otherwise, between cuts.
        """
        found, passes = [], self._of.passes_of(self._chain)
        again = self._of.microbatches * between(passes.busy + passes.forward)
        for rank, (held, limit, copies) in enumerate(zip(self.held, self._limits, seconds, strict=True)):
            if not self._known:
                copies = np.where(self._may_recompute(rank), np.minimum(copies, again), copies)
            found.append(self._band(np.where(self._only_moved(held, limit), copies, 0.0), rank))
        return np.array(found)

    def _may_recompute(self, rank: int) -> npt.NDArray[np.bool_]:
        """Return where a rank may recompute though it moves activations if it can, as far as is known before that."""
        use = self._memory[rank][ActivationMemory.OFFLOADED].on_host
        assert use is not None
        assert use.has_room is not None
        fits: npt.NDArray[np.bool_] = self.held[rank][ActivationMemory.RECOMPUTED] <= self._limits[rank]
        return fits & ~use.has_room

    @staticmethod
    def _only_moved(held: Mapping[ActivationMemory, Floats], limit: float) -> npt.NDArray[np.bool_]:
        """Return where a rank has room only if it moves activations, as far as what it holds then is known."""
        found = held[ActivationMemory.KEPT] > limit
        return found & (held.get(ActivationMemory.OFFLOADED, 0.0) <= limit)

    def _rank_times(self, more: Floats) -> RankWork:
        """Return the times of ranks from begin to end, given what recompute takes."""
        passes = self._of.passes_of(self._chain)
        forward = self._bands(passes.forward) * self._slow
        busy = self._bands(passes.busy) * self._slow + more
        path = self._bands(passes.path) * self._slow + more
        updates = np.array([self._band(self._chain.updates, rank) for rank in range(self._of.depth)])
        step = (self._bands(self._steps) + self._update * updates) * self._slow
        before, behind = np.zeros((2, *busy.shape[:2]))
        if only_busy_counts(self._of):
            return RankWork(busy, path, forward, step, before[:, :, None], path, behind[:, None, :])
        so_far = (path[0] + step[0])[0]  # others wait for the first update, too
        for rank in range(1, self._of.depth):
            before[rank] = so_far + 2 * rank * self._hop
            so_far = (so_far[:, None] + path[rank]).min(axis=0)
        rest = np.where(np.arange(busy.shape[1]) < busy.shape[1] - 1, np.inf, 0.0)
        for rank in reversed(range(self._of.depth)):
            behind[rank] = rest + 2 * (self._of.depth - 1 - rank) * self._hop
            rest = (path[rank] + rest).min(axis=1)
        through = path + behind[:, None, :]
        return RankWork(busy, path, forward, step, before[:, :, None], through, behind[:, None, :])


def _matrices(memory: RankWays, on_host: float | None) -> dict[ActivationMemory, Floats]:
    """Return the bytes of a rank between cuts, by what it does; infinite where the host has no room for the rest."""
    found = {does: each.between_cuts() for does, each in memory.items()}
    for does, each in memory.items():
        if on_host is not None and each.on_host is not None and each.on_host.held is not None:
            found[does] = np.where(each.on_host.held > on_host, np.inf, found[does])
    return found
