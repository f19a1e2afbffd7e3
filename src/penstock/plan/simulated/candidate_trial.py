"""One configuration, tried: cut where it fits and is fastest, and simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.byte_sizes import human_bytes
from penstock.errors import CapabilityError, ScheduleError
from penstock.plan.planners.two_bw import single_device_ways
from penstock.plan.simulated.block_chain import BlockChain, Floats, PassSums
from penstock.plan.simulated.candidate import Candidate, RankWork
from penstock.plan.simulated.candidate_memory import CandidateMemory
from penstock.plan.simulated.fitting_cuts import FittingCuts
from penstock.plan.simulated.planned_methods import least_microbatches
from penstock.plan.simulated.rank_memory import Cuts
from penstock.plan.simulated.schedule_cache import KnownSchedules
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Skipped, StageRating
from penstock.schedule.machine.shared_cores import SharedCores
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.sharding_traffic import Network

NAME = "simulated"
_MOST_PASSES = 1 << 16  # forwards of a schedule that is proven and simulated
_SPANS = (3, 5)  # batches: what two more of them take
_NO_BYTES = 1e-30  # of a network, which has to carry something


_Found = TypeVar("_Found")


class NoPlanError(Exception):
    """There is no plan, or none that is fast enough.

    Attributes:
        skipped: what is left out, and why.
    """

    def __init__(self, skipped: Skipped) -> None:
        super().__init__(skipped.bound)
        self.skipped = skipped


class TimedCuts(NamedTuple):
    """Cuts that fit.

    Attributes:
        cuts: where stages begin, and where the last one ends.
        again: which ranks recompute.
        batch: seconds of one more batch of a long run.
        seconds: of it per sample.
    """

    cuts: Cuts
    again: tuple[bool, ...]
    batch: float
    seconds: float


class CandidateTrial:
    """One configuration: cut, proven and simulated.

    Attributes:
        of: the configuration.

    Args:
        candidate: which.
        chain: its blocks.
        devices: to plan for.
        known: schedules of this candidate and others.
        twin: that differs in the order of ranks, where the same cuts fit, or in what is away.
    """

    def __init__(
        self,
        candidate: Candidate,
        chain: BlockChain,
        devices: Devices,
        known: KnownSchedules,
        twin: CandidateTrial | None = None,
    ) -> None:
        self.of, self._chain, self._devices, self._known = candidate, chain, devices, known
        self._fits: dict[tuple[bool, bool], FittingCuts] = {} if twin is None else twin._fits
        self._fitting: FittingCuts  # by what is known so far

    def twin(self, **changes: Any) -> CandidateTrial:
        """Return the same with another `rank_order`, or with optimizer states `away`."""
        return CandidateTrial(replace(self.of, **changes), self._chain, self._devices, self._known, self)

    # What follows is found when it is first asked for: of most candidates the first bound says enough.

    @cached_property
    def _passes(self) -> PassSums:
        return self.of.passes_of(self._chain)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.of.method.ranks(self.of.depth)

    @cached_property
    def _between(self) -> list[int]:
        """The cuts between ranks."""
        return [s for s in range(1, self.of.stages) if self._ranks[s - 1] != self._ranks[s]]

    @cached_property
    def memory(self) -> CandidateMemory:
        """What its ranks hold."""
        return CandidateMemory(self.of, self._chain, self._devices, self._known)

    @cached_property
    def _slow(self) -> Floats:
        """How many times as long as the profile says each stage takes."""
        slow: Floats = 1 / self.of.speeds[list(self._ranks)]
        return slow

    @cached_property
    def _steps(self) -> Floats:
        """Seconds of updates of the first 0, 1, .. blocks."""
        return self.of.updates(self._chain, self._devices)

    @cached_property
    def _across(self) -> float:
        """Bytes per second between replicas."""
        return self.of.bandwidths(self._devices)[0]

    @cached_property
    def _along(self) -> Floats:
        """Bytes per second between ranks, of the messages at each cut."""
        pairs = [(self._ranks[stage - 1], self._ranks[stage]) for stage in self._between]
        return self.of.links(self._devices).along(pairs)

    def plan(self, best: float) -> Plan | Skipped:
        """Return the plan, or why there is none that is faster than `best` seconds per sample."""
        try:
            for bound in self.bounds():
                if bound >= best:
                    raise self._none(f"takes {bound:.4g} s per sample at least, the best plan so far {best:.4g}")
            return self.planned(self.fastest(best))
        except NoPlanError as error:
            return error.skipped

    def bounds(self) -> Iterator[float]:
        """Yield the seconds per sample that it takes at least where it fits: by forecast, then by what ranks hold.

        Raises:
            NoPlanError: it does not fit, or there is no schedule.
        """
        of, least = self.of, least_microbatches(self.of.method, self.of.depth)
        if of.passes > _MOST_PASSES:
            raise self._none(f"{of.stages} x {of.microbatches} passes are too many to prove it here ({_MOST_PASSES:,})")
        if of.microbatches < least:
            raise self._none(f"refused: it needs at least {least} microbatches for each pipeline")
        bound = of.bound(self._chain, self._devices)
        self._fitting = self._fit_once(scheduled=False)
        yield max(self._least(), bound)
        if self._devices.memory is not None:
            self._fitting = self._scheduled(lambda: self._fit_once(scheduled=True))
            yield max(self._least(), bound)

    def fastest(self, best: float) -> TimedCuts:
        """Find the fastest cuts, after all bounds: of all if they are few, otherwise of those near the first ones.

        Raises:
            NoPlanError: they are no faster than `best` seconds per sample, or there is no schedule.
        """
        found = self._scheduled(self._fastest)
        if found.seconds >= best:
            raise self._none(f"takes {found.seconds:.4g} s per sample, the best plan so far {best:.4g}")
        return found

    def _scheduled(self, find: Callable[[], _Found]) -> _Found:
        """Find something that needs the schedule.

        Raises:
            NoPlanError: there is none.
        """
        try:
            return find()
        except (ScheduleError, CapabilityError) as error:
            raise self._none(f"refused: {str(error).splitlines()[0]}") from None

    def _none(self, why: str) -> NoPlanError:
        return NoPlanError(Skipped(str(self.of), why))

    # --- memory -----------------------------------------------------------------------------------------------------

    def fit_of_span(self) -> FittingCuts:
        """Return which cuts fit, by what ranks hold in a span.

        Raises:
            ScheduleError: there is no schedule.
            CapabilityError: what it holds is not predicted.
        """
        return self.memory.of_span()

    def _fit_once(self, scheduled: bool) -> FittingCuts:
        """Return which cuts fit, by what ranks hold in a span or by forecast."""
        key = self.of.away, scheduled
        if key not in self._fits:
            self._fits[key] = self.memory.of_span() if scheduled else self.memory.of_forecast()
        return self._fits[key]

    def _least(self) -> float:
        """Return the seconds per sample that it takes at least, cut where it fits by what is known so far.

        Raises:
            NoPlanError: no cuts fit.
        """
        of, batch = self.of, self._fitting.least_batch
        if batch is not None:
            return (batch + of.least_after(self._chain, self._devices) * of.method.flushes) / of.samples
        average, room = self._fitting.least(), sum(of.limits(self._devices)) / of.depth
        least, limit = human_bytes(average, 2), human_bytes(room, 2)
        if average > room:
            raise self._none(f"does not fit: at least {least} per device on average, but it has {limit}")
        many = f"{least} of {limit} per device at least on average"
        raise self._none(f"does not fit: {many}, but some stage takes more however the blocks are cut")

    # --- time -------------------------------------------------------------------------------------------------------

    def _fastest(self) -> TimedCuts:
        """Find the fastest cuts that fit: of all if they are few, otherwise of those near, as long as that helps."""
        fit = self._fitting
        assert fit.first is not None, "a bound is known, so some cuts fit"
        found = self._faster([fit.first], None)
        assert found is not None, "the first cuts fit"
        if fit.are_few():
            return self._faster(fit.all(), found) or found
        better: TimedCuts | None = found
        while better is not None:
            found, better = better, self._faster(fit.near(better.cuts), better)
        return found

    def _faster(self, trials: Iterable[Cuts], than: TimedCuts | None) -> TimedCuts | None:
        """Return the fastest of some cuts; None if it is not faster than what was found."""
        limit = math.inf if than is None else than.batch
        fitting = [(cuts, again) for cuts in trials if (again := self._fitting.recomputes(cuts)) is not None]
        several = [each for each in fitting if self.least_batch(*each) < limit]
        times = self.batch_times(several) if several else [limit]
        least = int(np.argmin(times))
        if times[least] >= limit:
            return None
        return TimedCuts(*several[least], times[least], times[least] / self.of.samples)

    def batch_times(self, several: Sequence[tuple[Cuts, Sequence[bool]]]) -> list[float]:
        """Return what one more batch of a long run takes, for cuts and the ranks that recompute.

        Short spans may show less than the busiest rank takes, as long as the others catch up.
        """
        costs = [self.costs(np.array(cuts), again) for cuts, again in several]
        short, long = (self._known.span(self.of.schedule, batches)(costs) for batches in _SPANS)
        more = [(b.makespan - a.makespan) / (_SPANS[1] - _SPANS[0]) for a, b in zip(short, long, strict=True)]
        return [max(each, self._busiest(of)) for each, of in zip(more, costs, strict=True)]

    def _busiest(self, costs: Costs) -> float:
        """Return the seconds of a batch in which the busiest rank runs its passes and updates."""
        of = [s.step + self.of.microbatches * (s.forward + s.backward_input + s.backward_weight) for s in costs.stages]
        return float(np.bincount(self._ranks, of).max())

    def costs(self, cuts: npt.NDArray[np.intp], again: Sequence[bool]) -> Costs:
        """Return the times of stages and messages; all messages take the time of the longest.

        Args:
            cuts: where stages begin, and where the last one ends.
            again: which ranks recompute.
        """
        of, (times, transfer, parameters) = self.of, self._stage_times(cuts, again)
        across, network = self._across, None
        if of.shards > 1:
            made = self._known.schedule(of.schedule)
            network = Network(made, of.width, across, max(parameters, _NO_BYTES), weight_bytes=1, gradient_bytes=1)
        return Costs(
            tuple(StageCost(*each) for each in times.T.tolist()),
            latency=self._devices.latency,
            transfer=transfer,
            collective=of.sums(parameters, across)[0],
            network=network,
            cores=None if self._devices.cores is None else SharedCores(self._devices.cores / of.width),  # in step
        )

    def _stage_times(self, cuts: npt.NDArray[np.intp], again: Sequence[bool]) -> tuple[Floats, float, float]:
        """Return seconds of stages, rows as `StageCost` has them, and of the longest message; bytes of the largest."""
        of, chain = self.of, self._chain
        forward, first, second = (np.diff(sums[cuts]) * self._slow for sums in self._passes)
        first = first + forward * np.array([again[rank] for rank in self._ranks])
        crossing, between = chain.crossing[cuts[self._between]], np.array(self._between, int)
        ends = np.bincount([*between - 1, *between], minlength=of.stages)  # messages of a pass
        work = self._devices.message_work(float(crossing.max(initial=0.0)), of.depth * of.width)
        more = ends * work + self._devices.between
        forward, first = forward + more, first + more
        second = second + self._devices.between if of.method.halved else second
        parameters = float(chain.parameters[cuts[:-1], cuts[1:]].max())
        transfer = float((crossing / self._along).max(initial=0.0))
        return np.array([forward, first, second, np.diff(self._steps[cuts]) * self._slow]), transfer, parameters

    def least_batch(self, cuts: Cuts, again: Sequence[bool]) -> float:
        """Return the seconds that a batch takes at least with these cuts, as `Candidate.of_ranks` says."""
        of, (times, transfer, parameters) = self.of, self._stage_times(np.array(cuts), again)
        forward, first, second, steps = times
        ranks = np.arange(of.depth)
        own, hop = forward + first, 2 * (transfer + self._devices.latency)
        busy, path, step = (np.bincount(self._ranks, each).astype(float) for each in (own + second, own, steps))
        before = (np.cumsum(own) - own)[: of.depth] + ranks * hop + (ranks > 0) * step[0]
        after = np.cumsum(own[::-1])[::-1]  # of a stage and those behind it
        through, behind = after[: of.depth] + (of.hops - ranks) * hop, (after - own)[-of.depth :] + ranks[::-1] * hop
        work = RankWork(busy, path, forward[: of.depth], step, before, through, behind)
        sums = of.after(of.sums(parameters, self._across))
        least = max(float(of.of_ranks(work, ranks).max()), of.microbatches * of.messages * transfer)
        return least + sums if of.method.flushes else max(least, sums)

    # --- the plan ---------------------------------------------------------------------------------------------------

    def planned(self, found: TimedCuts) -> Plan:
        """Return the plan with cuts."""
        fit = self._fitting if self._devices.memory is not None else self.fit_of_span()
        of, cuts, graph = self.of, found.cuts, self.of.sized.graph
        seconds, width = found.batch / of.sized.microbatches, of.width
        again_too = [
            found.again[rank] * (self._passes.forward[last] - self._passes.forward[first])
            for rank, (first, last) in zip(self._ranks, pairwise(cuts), strict=True)
        ]
        busy = (np.diff(self._passes.busy[list(cuts)]) + again_too) * self._slow
        updates = np.diff(self._steps[list(cuts)]) * self._slow / of.sized.microbatches
        stages, ratings = [], []
        for stage, (rank, (first, last)) in enumerate(zip(self._ranks, pairwise(cuts), strict=True)):
            again, own = found.again[rank], self.memory.on[rank]
            ways, layers = single_device_ways(graph, again), tuple(range(first, last))
            named = tuple(ways[n].name for n in layers) if ways else ()
            on = of.on[rank] if of.on else None
            stages.append(PlannedStage(layers, width, 1, named, sharded=of.shards > 1, on=on))
            idle = seconds - float((busy[own] / width + updates[own]).sum())
            parts = {"compute": float(busy[stage]) / width, "updates": float(updates[stage])}
            parts["bubble"] = max(idle, 0.0) / len(own)
            ratings.append(StageRating(parts["compute"], parts, fit.held(rank, cuts, again)))
        notes = (f"{of}: one more batch of a long run takes {found.batch:.4g} s",)
        rating = Rating(NAME, seconds, tuple(ratings))
        settings = self.settings(cuts, found.again)
        return Plan(of.method.name, tuple(stages), rating, notes, of.sized.samples, settings, of.method.chunks)

    def settings(self, cuts: Cuts, again: Sequence[bool]) -> dict[str, Any]:
        """Return the keys of `penstock train` that run it.

        Args:
            cuts: where stages begin, and where the last one ends.
            again: which ranks recompute.
        """
        of, modes = self.of, ["block" if again[rank] else "none" for rank in self._ranks]
        found: dict[str, Any] = {"method": of.method.row, "stages": of.depth, "width": of.width}
        if of.method.options:
            found["options"] = of.method.options
        if of.shards > 1:
            found["sharding"] = of.sharding
        if of.away:
            found["offload_optimizer"] = "pieces"
        found |= {
            "microbatches": of.microbatches,
            "microbatch_size": of.sized.samples,
            "recompute": modes[0] if len(set(modes)) == 1 else modes,
            "balance": [last - first for first, last in pairwise(cuts)],
        }
        if of.on:
            found["placement"] = list(of.placement)
        return found
