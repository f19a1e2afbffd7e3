"""What the ranks of a configuration hold, whatever its cuts are: by forecast, and by what its schedule holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from penstock.plan.candidates.block_chain import BlockChain, Floats
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import (
    ActivationMemory,
    StageForecast,
    of_full_sharding,
    stage_forecast,
)
from penstock.plan.candidates.rank_memory import HostUse, RankMemory, RankWays, StageSizes
from penstock.plan.candidates.schedule_cache import KnownSchedules, Moment
from penstock.plan.stages.device_hierarchy import Devices
from penstock.schedule.ir.schedule import WINDOW
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.proof.proof import StageFacts
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import MemoryOptions, always_there, rotates


class CandidateMemory:
    """What the ranks of a configuration hold.

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

    def of_span(self) -> list[RankWays]:
        """Return what each rank holds in a span.

        Raises:
            ScheduleError: there is no schedule.
            CapabilityError: what it holds is not predicted.
        """
        return self._ways(lambda rank, does: self._known.moments(self.of.schedule, does)[rank], self._on_host)

    def of_forecast(self) -> list[RankWays]:
        """Return what each rank will hold at least."""
        return self._ways(self.foreseen, self._foreseen_on_host)

    def _forecast(self, stage: int) -> StageForecast:
        if stage not in self._forecasts:
            of = self.of
            self._forecasts[stage] = stage_forecast(of.method, of.depth, of.microbatches, stage, of.shards > 1)
        return self._forecasts[stage]

    def foreseen(self, rank: int, does: ActivationMemory) -> list[Moment]:
        """Return what a rank holds at least at one moment, or at several.

        With one stage, in a backward with all that is in flight. With several, before the first backward, which is that
        of the last of them. Where state is divided, also before an update, when gradients are whole; on divided
        weights at the end of a run, where these are whole again.

        Args:
            rank: which.
            does: what it does with its activations.
        """
        stages, found = self.on[rank], dict[tuple[int, HeldKind], float]()
        again = does is ActivationMemory.RECOMPUTED
        for stage in stages:
            flight = self._forecast(stage).activations
            found |= {(stage, HeldKind.OPTIMIZER): 1.0, (stage, HeldKind.SCRATCH): 1.0}
            if does is ActivationMemory.OFFLOADED:
                found |= {(stage, HeldKind.GRAPH): 1.0, (stage, HeldKind.LEFT): flight - 1.0}
            else:
                found[stage, HeldKind.SAVED if again else HeldKind.GRAPH] = flight
        last = (stages[-1], HeldKind.SAVED)
        if again and (len(stages) == 1 or not self.of.method.halved):
            found |= {last: found[last] - 1, (stages[-1], HeldKind.BACKWARD): 1.0}
        if self.of.shards == 1 and not self.of.method.full:
            return [found]
        kinds = [HeldKind.OPTIMIZER, HeldKind.WHOLE, *[HeldKind.SCRATCH] * (not self.of.method.full)]
        return [found, {(stage, kind): 1.0 for stage in stages for kind in kinds}]

    def most_beside_host(self, rank: int) -> list[Moment]:
        """Return what a rank that moves its activations to the host holds on its device at most, at several moments.

        All methods that move any have one stage on each rank. One forward or backward runs beside a copy, or two copies
        beside none; a lane has `WINDOW` messages on their way; whole gradients are there when the batch is over.
        """
        flight, always = self._forecast(rank).activations, (HeldKind.OPTIMIZER, HeldKind.SCRATCH)
        beside = {(rank, kind): 1.0 for kind in always}
        beside |= {(rank, kind): float(WINDOW) for kind in (HeldKind.OUTPUT, HeldKind.GRADIENT)}
        graph, left = (rank, HeldKind.GRAPH), (rank, HeldKind.LEFT)
        found = [beside | {graph: n, left: flight - n} for n in (1.0, 2.0) if n <= flight]
        return [*found, beside | {(rank, HeldKind.WHOLE): 1.0}]

    def _ways(
        self,
        moments: Callable[[int, ActivationMemory], Sequence[Moment]],
        on_host: Callable[[int, ActivationMemory], HostUse | None],
    ) -> list[RankWays]:
        """Return the memory of each rank, given what it holds by what it does with its activations, and what the host.

        Args:
            moments: of a rank.
            on_host: what is known of that.
        """
        tried = [ActivationMemory.KEPT]
        if self._devices.memory is not None:
            tried += [ActivationMemory.OFFLOADED] * self.of.offloads + [ActivationMemory.RECOMPUTED]
        return [
            {each: self._rank_memory(stages, moments(rank, each), each, on_host(rank, each)) for each in tried}
            for rank, stages in enumerate(self.on)
        ]

    def _on_host(self, rank: int, does: ActivationMemory) -> HostUse | None:
        """Return what a rank has in the memory of the host; None if it has nothing there.

        Raises:
            ScheduleError: there is no schedule.
        """
        of, sizes, host = self.of, self._chain.sizes, self._devices.host
        if of.away:
            return HostUse(sizes[HeldKind.OPTIMIZER] / of.shards, None)
        if does is not ActivationMemory.OFFLOADED:
            return None
        assert host is not None, "no bandwidth to the host is known"
        made, moved = self._known.copies(of.schedule)[rank], sizes[HeldKind.MOVED]
        return HostUse(made.most_away * moved, made.of_batch * moved / host)

    def _foreseen_on_host(self, rank: int, does: ActivationMemory) -> HostUse | None:
        """Return the same before there is a schedule: what copies take at least, and where there is room for sure."""
        if does is not ActivationMemory.OFFLOADED:
            return self._on_host(rank, does)
        most = self._rank_memory(self.on[rank], self.most_beside_host(rank), does, None).between_cuts()
        has_room = most <= self.of.limits(self._devices)[rank]
        if self._devices.host_memory is not None:
            away = self._forecast(rank).activations - 1.0
            has_room &= away * self._chain.sizes[HeldKind.MOVED] <= self._devices.host_memory
        return HostUse(None, self.least_copies, has_room)

    @cached_property
    def least_copies(self) -> Floats:
        """The seconds of a batch, between cuts, in which a rank copies activations that has no room for them, at least.

        It copies all microbatches but the first and the last one.
        """
        assert self._devices.host is not None, "no bandwidth to the host is known"
        found: Floats = 2 * max(self.of.microbatches - 2, 0) * self._chain.sizes[HeldKind.MOVED] / self._devices.host
        return found

    def _rank_memory(
        self, stages: Sequence[int], moments: Sequence[Moment], does: ActivationMemory, on_host: HostUse | None
    ) -> RankMemory:
        forecast, again = self._forecast(stages[0]), does is ActivationMemory.RECOMPUTED
        key = forecast.rule, forecast.facts, again
        if key not in self._there:
            self._there[key] = self._sizes_and_scratch(forecast, again)
        sizes, scratch = self._there[key]
        if not scratch:
            moments = [{key: n for key, n in each.items() if key[1] is not HeldKind.SCRATCH} for each in moments]
        return RankMemory(stages, sizes, moments, on_host)

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
