"""One configuration, tried: cut where it fits and is fastest, proven, and simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.byte_sizes import human_bytes
from penstock.errors import ScheduleError
from penstock.plan.planners.block_chain import BlockChain, Floats
from penstock.plan.planners.proof_forecast import StageForecast, least_microbatches, stage_forecast
from penstock.plan.planners.schedule_cache import KnownSchedules, ScheduleKey
from penstock.plan.planners.two_bw import Sized, single_device_ways
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Skipped, StageRating
from penstock.plan.stages.two_bw_cost import bandwidths
from penstock.schedule.machine.shared_cores import SharedCores
from penstock.schedule.methods.find_method import find_method
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import AlwaysThere, MemoryOptions, always_there, rotates

Cuts: TypeAlias = tuple[int, ...]
"""Where stages begin, and where the last one ends."""

NAME = "simulated"
_MOST_PASSES = 1 << 16  # stages x microbatches of a schedule that is proven and simulated
_MOST_CUTS = 256  # that are all simulated
_SPANS = (3, 5)  # batches: what two more of them take


@dataclass(frozen=True)
class Candidate:
    """A configuration before it is cut into stages.

    Attributes:
        sized: the graph at a microbatch size.
        method: a row of the method table.
        depth, width: d and w.
        recompute: of every layer, or of none.
    """

    sized: Sized
    method: str
    depth: int
    width: int
    recompute: bool

    @property
    def microbatches(self) -> int:
        """Per pipeline and batch."""
        return self.sized.microbatches // self.width

    @property
    def schedule(self) -> ScheduleKey:
        """What its schedule is known by."""
        return ScheduleKey(self.method, self.depth, self.microbatches, self.width > 1)

    def bound(self, chain: BlockChain, devices: Devices, slowest: float) -> float:
        """Return the seconds per sample that it takes at least.

        A stage is busy for m microbatches, and a lane of messages for m of these. With a flush the batch begins once
        the forwards of the stages before have run, and ends with their backwards, the sums of gradients and updates of
        the first; so if T is the time of the batch without these, m t_s + sum of t_i before s <= T for every stage,
        hence T (1 - (1 - 1/m)^d) is at least the sum of all t.

        Args:
            chain: of its blocks.
            devices: of whose links messages and sums of gradients take time.
            slowest: at least so many seconds the slowest stage takes for a microbatch.
        """
        m, d = self.microbatches, self.depth
        across, along = bandwidths(devices, self.width, d)
        total, sums = float(chain.seconds[-1]), self.reduction(float(chain.parameters[0, -1]) / d, across)
        hops = d - 1
        message = float(chain.crossing[1:-1].min(initial=math.inf)) / along if hops else 0.0
        steady = m * max(slowest, message)
        if find_method(self.method).rule == "flush":
            path = total + 2 * hops * (message + devices.latency)
            batch = max(steady, path, total / (1 - (1 - 1 / m) ** d)) + sums
        else:
            batch = max(steady, sums)
        return batch / (self.sized.microbatches * self.sized.samples)

    def reduction(self, parameters: float, bandwidth: float) -> float:
        """Return the seconds of a sum of gradients over the replicas of a stage."""
        return 2 * (self.width - 1) / self.width * parameters / bandwidth

    def __str__(self) -> str:
        """Return it in words."""
        size = f", microbatch {self.sized.samples}" if self.sized.samples > 1 else ""
        again = ", recompute" if self.recompute else ""
        return f"{self.method}, depth {self.depth}, width {self.width}{size}{again}"


class CandidateTrial:
    """One configuration: cut, proven and simulated."""

    def __init__(self, candidate: Candidate, chain: BlockChain, devices: Devices, known: KnownSchedules) -> None:
        self._of, self._chain, self._devices, self._known = candidate, chain, devices, known
        self._options = MemoryOptions(low_precision=chain.low_precision, blockwise=candidate.recompute)
        self._limit = math.inf if devices.memory is None else devices.memory
        self._best: Cuts = ()
        self._held: list[Floats] = []

    def plan(self, best: float) -> Plan | Skipped:
        """Return the plan, or why there is none that is faster than `best` seconds per sample."""
        of, name = self._of, str(self._of)
        if of.depth * of.microbatches > _MOST_PASSES:
            return Skipped(
                name, f"{of.depth} x {of.microbatches} passes are too many to prove it here ({_MOST_PASSES:,})"
            )
        least = least_microbatches(of.method, of.depth)
        if of.microbatches < least:
            return Skipped(name, f"refused: it needs at least {least} microbatches for each pipeline")
        foreseen = [stage_forecast(of.method, of.depth, of.microbatches, stage) for stage in range(of.depth)]
        chain = self._chain
        self._held = [
            chain.memory(self._always(f), [chain.in_flight(f.activations, self._rotates(f))]) for f in foreseen
        ]
        cuts = self._cuts()
        if cuts is None:
            return self._too_large()
        times = np.diff(chain.seconds[list(cuts)])
        bound = of.bound(chain, self._devices, float(times.max()))
        if bound >= best:
            return Skipped(
                name, f"its best stages take {bound:.4g} s per sample at least, the best plan so far {best:.4g}"
            )
        try:
            if self._limit < math.inf:
                self._held = self._memory(foreseen, batches=1)
            found = self._fastest(best)
            if isinstance(found, Skipped):
                return found
            self._held = self._memory(foreseen, batches=2)
            if not self._fit(self._best):
                found = self._fastest(best)
        except ScheduleError as error:
            return Skipped(name, f"refused: {str(error).splitlines()[0]}")
        return found if isinstance(found, Skipped) else self._planned(self._best, found)

    def _fastest(self, best: float) -> float | Skipped:
        """Find the fastest cuts that fit; return the seconds of a batch, or why there are none."""
        cuts, sized = self._cuts(), self._of.sized
        if cuts is None:
            return self._too_large()
        batch = self._simulated(cuts)
        seconds = batch / (sized.microbatches * sized.samples)
        if seconds >= best:
            return Skipped(str(self._of), f"takes {seconds:.4g} s per sample, the best plan so far {best:.4g}")
        return batch

    def _memory(self, foreseen: Sequence[StageForecast], batches: int) -> list[Floats]:
        """Return the bytes of each stage between each cut and each later one, as the runtime's ledger counts them.

        Those of one batch are less than those of two, and found sooner.

        Raises:
            ScheduleError: there is no schedule.
        """
        moments = self._known.moments(self._of.schedule, self._of.recompute, batches)
        return [
            self._chain.memory(self._always(f), here if self._rotates(f) else [_without_scratch(each) for each in here])
            for f, here in zip(foreseen, moments, strict=True)
        ]

    def _always(self, foreseen: StageForecast) -> AlwaysThere:
        """Return the weights and gradients of a stage that are always there."""
        return always_there(foreseen.rule, foreseen.facts, self._options, self._of.recompute)

    def _rotates(self, foreseen: StageForecast) -> bool:
        """Return whether updates of a stage take a scratch."""
        return rotates(foreseen.rule, foreseen.facts, self._options)

    def _too_large(self) -> Skipped:
        least = sum(float(memory[0, -1]) for memory in self._held) / len(self._held) / self._of.depth
        limit = human_bytes(self._limit, 2)
        return Skipped(
            str(self._of), f"does not fit: at least {human_bytes(least, 2)} per device on average, but it has {limit}"
        )

    def _cuts(self) -> Cuts | None:
        """Return where stages begin and end, so that the slowest is fastest and all fit; None if they cannot."""
        count = self._chain.blocks
        later = np.triu(np.ones((count + 1, count + 1), dtype=bool), 1)
        reached = np.full(count + 1, np.inf)
        reached[0], trail = 0.0, []
        for memory in self._held:
            times = np.where(later & (memory <= self._limit), self._chain.times, np.inf)
            through = np.maximum(reached[:, None], times)
            trail.append(through.argmin(axis=0))
            reached = through.min(axis=0)
        if not math.isfinite(reached[-1]):
            return None
        cuts = [count]
        for from_ in reversed(trail):
            cuts.append(int(from_[cuts[-1]]))
        return tuple(reversed(cuts))

    def _trials(self, cuts: Cuts) -> Iterator[list[Cuts]]:
        """Return cuts to try, group by group: all if they are few, otherwise those with one end moved by a block."""
        count, depth = cuts[-1], self._of.depth
        if math.comb(count - 1, depth - 1) <= _MOST_CUTS:
            every = ((0, *inner, count) for inner in combinations(range(1, count), depth - 1))
            yield [each for each in every if each != cuts and self._fit(each)]
            return
        while True:
            near = []
            for at, step in product(range(1, depth), (-1, 1)):
                moved = (*self._best[:at], self._best[at] + step, *self._best[at + 1 :])
                if moved[at - 1] < moved[at] < moved[at + 1] and self._fit(moved):
                    near.append(moved)
            before = self._best
            yield near
            if self._best == before:
                return

    def _fit(self, cuts: Cuts) -> bool:
        """Return whether all stages fit."""
        return all(memory[ends] <= self._limit for memory, ends in zip(self._held, pairwise(cuts), strict=True))

    def _batch_times(self, several: list[Cuts]) -> list[float]:
        """Return what one more batch of a long run takes, for each of several cuts."""
        costs = [self.costs(np.array(cuts)) for cuts in several]
        short, long = (self._known.span(self._of.schedule, batches)(costs) for batches in _SPANS)
        return [(b.makespan - a.makespan) / (_SPANS[1] - _SPANS[0]) for a, b in zip(short, long, strict=True)]

    def costs(self, cuts: npt.NDArray[np.intp]) -> Costs:
        """Return the times of stages and messages; all messages take the time of the largest."""
        of, chain = self._of, self._chain
        across, along = bandwidths(self._devices, of.width, of.depth)
        forwards, times, steps = (np.diff(sums[cuts]) for sums in (chain.forward, chain.seconds, chain.steps))
        none, largest = np.zeros(of.depth), float(chain.crossing[cuts[1:-1]].max(initial=0.0))
        # Every pass receives a message and sends one, but for the first and the last stage's.
        ends = 2.0 - (np.arange(of.depth) == 0) - (np.arange(of.depth) == of.depth - 1)
        messages = ends * self._devices.message_work(largest, of.depth * of.width)
        forwards, times = forwards + messages, times + 2 * messages
        return Costs(
            tuple(StageCost(*map(float, each)) for each in zip(forwards, times - forwards, none, steps, strict=True)),
            latency=self._devices.latency,
            transfer=largest / along,
            collective=of.reduction(float(chain.parameters[cuts[:-1], cuts[1:]].max()), across),
            cores=None if self._devices.cores is None else SharedCores(self._devices.cores / of.width),  # in step
        )

    def least_batch(self, cuts: Cuts) -> float:
        """Return the seconds that a batch takes at least with these cuts, as `Candidate.bound` says."""
        of, costs = self._of, self.costs(np.array(cuts))
        times, m = np.diff(self._chain.seconds[list(cuts)]), of.microbatches
        if find_method(of.method).rule != "flush":
            return max(m * float(times.max()), m * costs.transfer, costs.collective)
        before = np.cumsum(times) - times + 2 * np.arange(of.depth) * (costs.transfer + costs.latency)
        return max(float((m * times + before).max()), m * costs.transfer) + costs.collective

    def _simulated(self, cuts: Cuts) -> float:
        """Find the cut that is simulated to be fastest; returns what a batch takes with it."""
        self._best, (batch,) = cuts, self._batch_times([cuts])
        for trials in self._trials(cuts):
            several = [each for each in trials if self.least_batch(each) < batch]
            if several:
                times = self._batch_times(several)
                least = int(np.argmin(times))
                if times[least] < batch:
                    self._best, batch = several[least], times[least]
        return batch

    def _planned(self, cuts: Cuts, batch: float) -> Plan:
        """Return the plan with a cut."""
        of, chain = self._of, self._chain
        seconds = batch / of.sized.microbatches
        ways = single_device_ways(of.sized.graph, of.recompute)
        stages, ratings = [], []
        for stage, (first, last) in enumerate(pairwise(cuts)):
            layers = tuple(range(first, last))
            stages.append(PlannedStage(layers, of.width, 1, tuple(ways[n].name for n in layers) if ways else ()))
            busy = float(chain.seconds[last] - chain.seconds[first]) / of.width
            update = float(chain.steps[last] - chain.steps[first]) / of.sized.microbatches
            parts = {"compute": busy, "updates": update, "bubble": max(seconds - busy - update, 0.0)}
            ratings.append(StageRating(busy, parts, float(self._held[stage][first, last])))
        settings = {
            "method": of.method,
            "stages": of.depth,
            "width": of.width,
            "microbatches": of.microbatches,
            "microbatch_size": of.sized.samples,
            "recompute": "block" if of.recompute else "none",
            "balance": [last - first for first, last in pairwise(cuts)],
        }
        notes = (f"{of}: one more batch of a long run takes {batch:.4g} s",)
        return Plan(of.method, tuple(stages), Rating(NAME, seconds, tuple(ratings)), notes, of.sized.samples, settings)


def _without_scratch(held: dict[HeldKind, float]) -> dict[HeldKind, float]:
    """Return what is held where updates take no scratch: with one version of the weights, or in low precision."""
    return {kind: count for kind, count in held.items() if kind is not HeldKind.SCRATCH}
