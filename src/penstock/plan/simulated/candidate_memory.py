"""Which cuts of a configuration fit into the memory of its ranks: by forecast, and by what its schedule holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.plan.simulated.block_chain import BlockChain
from penstock.plan.simulated.candidate import Candidate
from penstock.plan.simulated.fitting_cuts import FittingCuts
from penstock.plan.simulated.planned_methods import StageForecast, of_full_sharding, stage_forecast
from penstock.plan.simulated.rank_memory import RankMemory, StageSizes
from penstock.plan.simulated.schedule_cache import KnownSchedules, Moment
from penstock.plan.stages.device_hierarchy import Devices
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.proof.proof import StageFacts
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import MemoryOptions, always_there, rotates


class CandidateMemory:
    """What the ranks of a configuration hold, and so which cuts fit.

    Attributes:
        of: the configuration.
        on: the stages of each rank.

    Args:
        candidate: which.
        chain: its blocks.
        devices: to plan for.
        known: schedules of this candidate and others.
    """

    def __init__(self, candidate: Candidate, chain: BlockChain, devices: Devices, known: KnownSchedules) -> None:
        self.of, self._chain, self._devices, self._known = candidate, chain, devices, known
        ranks = candidate.method.ranks(candidate.depth)
        self.on = [[s for s, r in enumerate(ranks) if r == rank] for rank in range(candidate.depth)]
        self._forecasts: dict[int, StageForecast] = {}
        self._there: dict[tuple[str, StageFacts, bool], tuple[StageSizes, bool]] = {}

    def of_span(self) -> FittingCuts:
        """Return which cuts fit, by what ranks hold in a span.

        Raises:
            ScheduleError: there is no schedule.
            CapabilityError: what it holds is not predicted.
        """
        return self._fit(lambda rank, again: self._known.moments(self.of.schedule, again)[rank])

    def of_forecast(self) -> FittingCuts:
        """Return which cuts fit, by what ranks will hold at least."""
        return self._fit(self.foreseen)

    def _forecast(self, stage: int) -> StageForecast:
        if stage not in self._forecasts:
            of = self.of
            self._forecasts[stage] = stage_forecast(of.method, of.depth, of.microbatches, stage, of.shards > 1)
        return self._forecasts[stage]

    def foreseen(self, rank: int, again: bool) -> list[Moment]:
        """Return what a rank holds at least at one moment, or at several.

        With one stage, in a backward with all that is in flight. With several, before the first backward, which is that
        of the last of them; and of a run on divided weights at the end, where weights are whole again.
        """
        stages, found = self.on[rank], dict[tuple[int, HeldKind], float]()
        for stage in stages:
            flight = self._forecast(stage).activations
            found |= {(stage, HeldKind.OPTIMIZER): 1.0, (stage, HeldKind.SCRATCH): 1.0}
            found[stage, HeldKind.SAVED if again else HeldKind.GRAPH] = flight
        last = (stages[-1], HeldKind.SAVED)
        if again and (len(stages) == 1 or not self.of.method.halved):
            found |= {last: found[last] - 1, (stages[-1], HeldKind.BACKWARD): 1.0}
        if not self.of.method.full:
            return [found]
        kinds = (HeldKind.OPTIMIZER, HeldKind.WHOLE)
        return [found, {(stage, kind): 1.0 for stage in stages for kind in kinds}]

    def _fit(self, moments: Callable[[int, bool], Sequence[Moment]]) -> FittingCuts:
        """Return which cuts fit, given what ranks hold, without recompute and with it."""
        memory = []
        for rank, stages in enumerate(self.on):
            plain = again = self._rank_memory(stages, moments(rank, False), again=False)
            if self._devices.memory is not None:
                again = self._rank_memory(stages, moments(rank, True), again=True)
            memory.append((plain, again))
        of, chain, devices = self.of, self._chain, self._devices
        steps, hop = of.updates(chain, devices), of.least_hop(chain, devices)
        return FittingCuts(of, chain, steps, hop, of.limits(devices), memory)

    def _rank_memory(self, stages: Sequence[int], moments: Sequence[Moment], again: bool) -> RankMemory:
        forecast = self._forecast(stages[0])
        key = forecast.rule, forecast.facts, again
        if key not in self._there:
            self._there[key] = self._sizes_and_scratch(forecast, again)
        sizes, scratch = self._there[key]
        if not scratch:
            moments = [{key: n for key, n in each.items() if key[1] is not HeldKind.SCRATCH} for each in moments]
        return RankMemory(stages, sizes, moments)

    def _sizes_and_scratch(self, forecast: StageForecast, again: bool) -> tuple[StageSizes, bool]:
        """Return what a stage takes, and whether its updates take scratch."""
        of, low, correction = self.of, self._chain.low_precision, self.of.method.correction
        options = MemoryOptions(low_precision=low, blockwise=again, correction=correction)
        there = always_there(forecast.rule, forecast.facts, options, again, of.shards > 1)
        if of.sharding == "full":
            there = of_full_sharding(of.method, low, forecast.facts.buffers)
        ahead = CORRECTIONS[correction].reads_ahead  # by the last gradient, which takes no room
        scratch = not ahead and rotates(forecast.rule, forecast.facts, options)
        return StageSizes.known(self._chain, there, of), scratch
