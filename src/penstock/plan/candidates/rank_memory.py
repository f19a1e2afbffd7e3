"""What the ranks of a candidate hold at most, in bytes: always, and at each moment that counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.plan.candidates.block_chain import BlockChain, Floats
from penstock.plan.candidates.candidate import Candidate
from penstock.plan.candidates.planned_methods import (
    ActivationMemory,
    StageForecast,
    of_full_sharding,
    stage_forecast,
)
from penstock.plan.candidates.schedule_cache import KnownSchedules, Moment
from penstock.plan.stages.device_hierarchy import Devices
from penstock.schedule.ir.schedule import WINDOW
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.proof.proof import StageFacts
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.predicted import AlwaysThere, MemoryOptions, always_there, rotates

Cuts: TypeAlias = tuple[int, ...]
"""Where stages begin, and where the last one ends."""

_DIVIDED = (HeldKind.OPTIMIZER, HeldKind.SCRATCH)  # by parallel pipelines that shard
_PIECES = 3  # of an optimizer's state that is away: in use, on its way, leaving
_KEPT = 1 << 20  # numbers that each of a chain's caches keeps, in matrices


Counts: TypeAlias = tuple[tuple[HeldKind, float], ...]
"""How many of each kind a rank with one stage holds."""
BUFFERS = "weights and gradients"
MASTERS = "master weights"
ACTIVATIONS = "activations"
FROZEN = "frozen parameters and buffers"
GATHERED = "gathered weights"
BETWEEN_RUNS = "weights between runs"
OPTIMIZER = "optimizer"
MESSAGES = "messages"
KINDS = (BUFFERS, MASTERS, GATHERED, BETWEEN_RUNS, OPTIMIZER, ACTIVATIONS, MESSAGES, FROZEN)
"""In the order in which they are shown."""
_NAMED: Mapping[HeldKind, str] = MappingProxyType({
    HeldKind.OUTPUT: MESSAGES,
    HeldKind.GRADIENT: MESSAGES,
    HeldKind.OPTIMIZER: OPTIMIZER,
    HeldKind.SCRATCH: OPTIMIZER,  # as the ledger has it
    HeldKind.WHOLE: BETWEEN_RUNS,
    HeldKind.GATHERED: GATHERED,
    HeldKind.FULL_GRADIENT: BUFFERS,
    HeldKind.SUM: BUFFERS,
    HeldKind.OLDER: BUFFERS,
})  # fmt: skip  # all others are of passes


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
        self._frozen, self._masters = chain.frozen, there.masters * chain.whole / (shards if there.rows else 1)
        self.fixed: Floats = (
            chain.frozen + there.versions * chain.buffer + (there.whole + there.rows / shards) * chain.whole
        )
        self.kinds = {**chain.sizes, **{kind: chain.sizes[kind] / shards for kind in _DIVIDED}}
        if of.away:
            self.kinds[HeldKind.OPTIMIZER] = np.minimum(self.kinds[HeldKind.OPTIMIZER], _PIECES * chain.pieces)
        self.kinds[HeldKind.WHOLE] = chain.whole + low * chain.buffer if full else there.rows * chain.whole
        self.kinds |= {HeldKind.GATHERED: chain.buffer, HeldKind.FULL_GRADIENT: chain.whole}
        self.kinds |= {HeldKind.SUM: low * chain.whole / shards, HeldKind.OLDER: low * chain.buffer / shards}
        self._most: dict[tuple[Counts, ...], Floats] = {}

    @classmethod
    def known(cls, chain: BlockChain, there: AlwaysThere, of: Candidate) -> StageSizes:
        """Return those of a chain, which many candidates have in common; arguments as of the class."""
        key = there, of.shards, of.sharding == "full", of.away
        found: StageSizes | None = chain.stage_sizes.get(key)
        if found is None:
            if len(chain.stage_sizes) * chain.buffer.size > _KEPT:
                chain.stage_sizes.clear()
            found = chain.stage_sizes[key] = cls(chain, there, of)
        return found

    def fixed_by_kind(self, first: int, last: int) -> dict[str, float]:
        """Return the bytes that are always there between two cuts, by kind."""
        whole, frozen, masters = (float(each[first, last]) for each in (self.fixed, self._frozen, self._masters))
        return {BUFFERS: whole - frozen - masters, MASTERS: masters, FROZEN: frozen}

    def most(self, moments: tuple[Counts, ...]) -> Floats:
        """Return the most bytes of a rank with one stage, between each cut and each later one.

        Args:
            moments: how many of each kind it holds at each of them.
        """
        if moments not in self._most:
            if len(self._most) * self.fixed.size > _KEPT:
                self._most.clear()
            most = np.zeros(self.fixed.shape)
            for counts in moments:
                found = np.zeros(most.shape)
                for kind, count in counts:
                    found += count * self.kinds[kind]
                np.maximum(most, found, out=most)
            self._most[moments] = self.fixed + most
        return self._most[moments]


class HostUse(NamedTuple):
    """What a rank with one stage has in the memory of the host, between each cut and each later one.

    Attributes:
        held: the most bytes; None as long as the schedule is not known.
        copies: seconds that activations take to go there and come back in a batch, until then at least; None if other
            things are there.
        has_room: whether there and on the device is room for what it holds at most; None once the schedule is known.
    """

    held: Floats | None
    copies: Floats | None
    has_room: npt.NDArray[np.bool_] | None = None


class RankMemory:
    """The most bytes of one rank.

    Attributes:
        sizes: of each of its stages.
        on_host: what it has there; None if nothing.

    Args:
        stages: that it has.
        sizes: of each of them.
        moments: what it holds at each moment that counts.
        on_host: as the attribute.
    """

    def __init__(
        self, stages: Sequence[int], sizes: StageSizes, moments: Sequence[Moment], on_host: HostUse | None = None
    ) -> None:
        self._stages, self.sizes, self._moments, self.on_host = stages, sizes, moments, on_host
        self._known: dict[tuple[tuple[int, int], ...], float] = {}  # bytes, by where its stages begin and end

    @cached_property
    def _kinds(self) -> list[tuple[int, HeldKind]]:
        """Of what is held, of each stage."""
        return sorted({key for each in self._moments for key in each})

    @cached_property
    def _counts(self) -> Floats:
        """How many of each of them, at each moment."""
        return np.array([[each.get(key, 0.0) for key in self._kinds] for each in self._moments])

    def between_cuts(self) -> Floats:
        """Return the bytes of a rank with one stage, between each cut and each later one."""
        return self.sizes.most(tuple(tuple(sorted((k, n) for (_, k), n in each.items())) for each in self._moments))

    def at(self, cuts: Cuts) -> float:
        """Return the bytes with cuts."""
        own = tuple([(cuts[stage], cuts[stage + 1]) for stage in self._stages])
        if own not in self._known:  # most cuts that are tried differ from others in few ranks
            fixed = sum(self.sizes.fixed[each] for each in own)
            self._known[own] = float(fixed + (self._counts @ self._sizes(cuts)).max(initial=0.0))
        return self._known[own]

    def by_kind(self, cuts: Cuts) -> dict[str, float]:
        """Return the bytes with cuts by kind, at the moment at which they are the most; they add up to those."""
        found = dict[str, float]()
        for stage in self._stages:
            for name, nbytes in self.sizes.fixed_by_kind(cuts[stage], cuts[stage + 1]).items():
                found[name] = found.get(name, 0.0) + nbytes
        if self._moments:
            sizes = self._sizes(cuts)
            counts = self._counts[np.argmax(self._counts @ sizes)]
            for (_, kind), nbytes in zip(self._kinds, (counts * sizes).tolist(), strict=True):
                found[ledger_kind(kind)] = found.get(ledger_kind(kind), 0.0) + nbytes
        return {name: found[name] for name in KINDS if found.get(name)}

    def _sizes(self, cuts: Cuts) -> Floats:
        """Return the bytes of one of each kind of what it holds."""
        return np.array([self.sizes.kinds[kind][cuts[stage], cuts[stage + 1]] for stage, kind in self._kinds])


RankWays: TypeAlias = Mapping[ActivationMemory, RankMemory]
"""The memory of a rank by what it does with its activations, in the order in which that is tried."""


# Kinds of what a device holds, in the words of the runtime's ledger.
#
# Buffers of the size of the parameters change their roles all the time: a version becomes idle, then a gradient, and in
# the end the next version. What the ledger calls weights, gradients, summed gradients and idle buffers is one kind
# here.


def ledger_kind(held: HeldKind) -> str:
    """Return the kind of something that comes and goes."""
    return _NAMED.get(held, ACTIVATIONS)


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
