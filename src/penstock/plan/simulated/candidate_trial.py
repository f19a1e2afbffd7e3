"""One configuration, tried: cut where it fits and is fastest, and simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.byte_sizes import human_bytes
from penstock.errors import CapabilityError, ScheduleError
from penstock.plan.candidates.block_chain import BlockChain, Floats, PassSums
from penstock.plan.candidates.candidate import Candidate, RankWork
from penstock.plan.candidates.candidate_memory import CandidateMemory
from penstock.plan.candidates.planned_methods import ActivationMemory, least_microbatches
from penstock.plan.candidates.rank_memory import Cuts, RankWays
from penstock.plan.candidates.schedule_cache import KnownSchedules, ScheduleKey
from penstock.plan.simulated.fitting_cuts import FittingCuts, TimedCuts, place_of
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Skipped, StageRating
from penstock.schedule.machine.shared_cores import SharedCores
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.sharding_traffic import Network

NAME = "simulated"
_MOST_PASSES = 1 << 16  # forwards of a schedule that is simulated
_MOST_THAT_GROW = 1 << 14  # the same where ranks hold more microbatches, the more there are
_SAME = 1e-3  # by how much the times of rounds of microbatches may differ
_SPANS = (3, 5)  # batches: what two more of them take
_NO_BYTES = 1e-30  # of a network, which has to carry something


_Found = TypeVar("_Found")


class NoPlanError(Exception):
    """There is no plan, or none that is fast enough.

    Attributes:
        skipped: what is left out, and why.
        refused: there is no schedule, whatever its ranks hold and how long they take.
    """

    def __init__(self, skipped: Skipped, refused: bool = False) -> None:
        super().__init__(skipped.bound)
        self.skipped, self.refused = skipped, refused


class CandidateTrial:
    """One configuration: cut, proven and simulated.

    Attributes:
        of: the configuration.

    Args:
        candidate: which.
        chain: its blocks.
        devices: to plan for.
        known: schedules of this candidate and others.
        twin: that differs in the order of ranks, where the same cuts fit, or in what is in the memory of the host.
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
        self._fits: dict[tuple[bool, bool, bool], FittingCuts] = {} if twin is None else twin._fits
        self._fitting: FittingCuts  # by what is known so far

    def twin(self, **changes: Any) -> CandidateTrial:
        """Return the same with another `rank_order`, with optimizer states `away`, or one that `offloads`."""
        return CandidateTrial(replace(self.of, **changes), self._chain, self._devices, self._known, self)

    def least_of_copies(self) -> float:
        """Return the seconds per sample that a twin takes at least that offloads and is faster than this.

        By what is known of the stages that fit here: of others some rank has one, or it is no faster. Infinite if there
        are none.
        """
        return self._fitting.least_copies([self.memory.least_copies] * self.of.depth) / self.of.samples

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

    def bounds(self) -> Iterator[float]:
        """Yield the seconds per sample that it takes at least where it fits: by forecast, then by what ranks hold.

        Raises:
            NoPlanError: it does not fit, or there is no schedule.
        """
        of, least = self.of, least_microbatches(self.of.method, self.of.depth)
        most = _MOST_THAT_GROW if of.method.grows else _MOST_PASSES
        if of.stages * of.played[-1] > most:
            raise self._none(
                f"{of.stages} x {of.played[-1]:,} forwards are too many to play them here ({most:,}); make "
                "batches smaller, or give a profile of larger microbatches",
                refused=True,
            )
        if of.microbatches < least:
            raise self._none(f"refused: it needs at least {least} microbatches for each pipeline", refused=True)
        bound = of.bound(self._chain, self._devices)
        self._fitting = self._fit_once(scheduled=False)
        yield max(self._least(), bound)
        if self._devices.memory is not None:
            self._fitting = self._scheduled(lambda: self._fit_once(scheduled=True))
            yield max(self._least(), bound)

    def fastest(self, best: tuple[float, int]) -> TimedCuts:
        """Find the fastest cuts, after all bounds: of all if they are few, otherwise of those near the first ones.

        Args:
            best: the place of the best plan so far.

        Raises:
            NoPlanError: they are no better than that, or there is no schedule.
        """
        found = self._scheduled(self._fastest)
        if self.place(found) >= best:
            raise self._none(f"takes {found.seconds:.4g} s per sample, the best plan so far {best[0]:.4g}")
        return found

    def place(self, found: TimedCuts) -> tuple[float, int]:
        """Return the place of cuts among all plans."""
        return place_of(found.seconds, found.activations, self.of.away)

    def _scheduled(self, find: Callable[[], _Found]) -> _Found:
        """Find something that needs the schedule.

        Raises:
            NoPlanError: there is none.
        """
        try:
            return find()
        except (ScheduleError, CapabilityError) as error:
            raise self._none(f"refused: {str(error).splitlines()[0]}", refused=True) from None

    def _none(self, why: str, refused: bool = False) -> NoPlanError:
        return NoPlanError(Skipped(str(self.of), why), refused)

    # --- memory -----------------------------------------------------------------------------------------------------

    def fit_of_span(self) -> FittingCuts:
        """Return which cuts fit, by what ranks hold in a span.

        Raises:
            ScheduleError: there is no schedule.
            CapabilityError: what it holds is not predicted.
        """
        return self._fitting_in(self.memory.of_span())

    def _fit_once(self, scheduled: bool) -> FittingCuts:
        """Return which cuts fit, by what ranks hold in a span or by forecast."""
        key = self.of.away, self.of.offloads, scheduled
        if key not in self._fits:
            self._fits[key] = self._fitting_in(self.memory.of_span() if scheduled else self.memory.of_forecast())
        return self._fits[key]

    def _fitting_in(self, memory: Sequence[RankWays]) -> FittingCuts:
        return FittingCuts(self.of, self._chain, self._devices, memory)

    def _least(self) -> float:
        """Return the seconds per sample that it takes at least, cut where it fits by what is known so far.

        Raises:
            NoPlanError: no cuts fit.
        """
        of, batch = self.of, self._fitting.least_batch
        if batch == math.inf:
            raise self._none("takes as long as without: no rank has room for its activations only if it moves them")
        if batch is not None:
            return (batch + of.least_after(self._chain, self._devices) * of.method.flushes) / of.samples
        average, room = self._fitting.least(), sum(of.limits(self._devices)) / of.depth
        least, limit = human_bytes(average, 2), human_bytes(room, 2)
        if average > room:
            raise self._none(f"does not fit: at least {least} per device on average, but it has {limit}")
        many, host = f"{least} of {limit} per device at least on average", ""
        if (of.away or of.offloads) and self._devices.host_memory is not None:
            host = f" there, or than {human_bytes(self._devices.host_memory, 2)} on the host,"
        raise self._none(f"does not fit: {many}, but some stage takes more{host} however the blocks are cut")

    # --- time -------------------------------------------------------------------------------------------------------

    def _fastest(self) -> TimedCuts:
        """Find the fastest cuts that fit: of all if they are few, otherwise of those near, as long as that helps."""
        fit = self._fitting
        assert fit.first is not None, "a bound is known, so some cuts fit"
        found = self._faster([fit.first], None)
        if fit.are_few():
            found = self._faster(fit.all(), found) or found
        else:
            better = found or self._faster(fit.near(fit.first), None)
            while better is not None:
                found, better = better, self._faster(fit.near(better.cuts), better)
        if found is None:
            raise self._none("does not fit: copies to the host take so long that too many activations wait for them")
        return found

    def _faster(self, trials: Iterable[Cuts], than: TimedCuts | None) -> TimedCuts | None:
        """Return the best of some cuts; None if it is no better than what was found."""
        limit = (math.inf, 0) if than is None else place_of(than.batch, than.activations)
        fitting = [(cuts, does) for cuts in trials if (does := self._fitting.activations(cuts)) is not None]
        several = [each for each in fitting if place_of(self.least_batch(*each), each[1]) < limit]
        times = self.batch_times(several) if several else []
        for place, n in sorted((place_of(times[n], does), n) for n, (_, does) in enumerate(several)):
            (cuts, activations), batch = several[n], times[n]
            if place >= limit:
                break
            found = TimedCuts(cuts, activations, batch, batch / self.of.samples)
            if not self.of.offloads or self._fits_in_time(found):
                return found
        return None

    def _fits_in_time(self, found: TimedCuts) -> bool:
        """Return whether ranks have room for activations that are not in the memory of the host yet."""
        limits = self.of.limits(self._devices)
        return all(held <= limit for held, limit in zip(self._held(self._fitting, found), limits, strict=True))

    def _held(self, fit: FittingCuts, found: TimedCuts) -> list[float]:
        """Return the most bytes of each rank, with activations for whose copies there has not been time."""
        cuts, activations = found.cuts, found.activations
        held = [fit.held(rank, cuts, does) for rank, does in enumerate(activations)]
        if ActivationMemory.OFFLOADED in activations:
            costs = self.costs(np.array(cuts), activations)
            for rank, late in self._known.not_gone(self.schedule(activations), _SPANS[1], costs).items():
                if activations[rank] is ActivationMemory.OFFLOADED:
                    held[rank] += late * float(self._chain.sizes[HeldKind.MOVED][cuts[rank], cuts[rank + 1]])
        return held

    def batch_times(self, several: Sequence[tuple[Cuts, Sequence[ActivationMemory]]]) -> list[float]:
        """Return what one more batch of a long run takes, for cuts and what ranks do with their activations.

        Short spans may show less than the busiest rank or lane of copies takes, as long as the others catch up. Of more
        microbatches than are played each further round takes as long as the last one that is.

        Raises:
            NoPlanError: these rounds do not take the same time.
        """
        costs = [self.costs(np.array(cuts), activations) for cuts, activations in several]
        alike, busiest = dict[ScheduleKey, list[int]](), np.array([self._busiest(each) for each in costs])
        for n, (_, activations) in enumerate(several):
            alike.setdefault(self.schedule(activations), []).append(n)
        found = np.zeros((len(self.of.played), len(costs)))
        for (key, own), (row, m) in product(alike.items(), enumerate(self.of.played)):
            played = key._replace(microbatches=m)
            short, long = (self._known.span(played, batches)([costs[n] for n in own]) for batches in _SPANS)
            more = [b.makespan - a.makespan for a, b in zip(short, long, strict=True)]
            found[row, own] = np.array(more) / (_SPANS[1] - _SPANS[0])
        return list(map(float, np.maximum(self._of_all_rounds(found), busiest)))

    def _of_all_rounds(self, times: Floats) -> Floats:
        """Return what a batch takes, given that with as many microbatches as are played.

        Raises:
            NoPlanError: rounds of microbatches do not take the same time.
        """
        found: Floats = times[-1]
        if len(times) > 1:
            (before, last), (_, fewer, most) = np.diff(times, axis=0), self.of.played
            if (np.abs(last - before) > _SAME * last).any():
                raise self._none(
                    f"rounds of microbatches do not take the same time by microbatch {most}, so it is not known what "
                    f"{self.of.microbatches:,} of them take; make batches smaller"
                )
            found = found + last * ((self.of.microbatches - most) // (most - fewer))
        return found

    def schedule(self, activations: Sequence[ActivationMemory]) -> ScheduleKey:
        """Return what the schedule is known by if ranks do this with their activations."""
        if not self.of.offloads:
            return self.of.schedule
        away = (stage for stage, rank in enumerate(self._ranks) if activations[rank] is ActivationMemory.OFFLOADED)
        return self.of.schedule._replace(offloaded=tuple(away))

    def _busiest(self, costs: Costs) -> float:
        """Return the seconds of a batch in which the busiest rank runs its passes and updates, or copies."""
        of = [s.step + self.of.microbatches * (s.forward + s.backward_input + s.backward_weight) for s in costs.stages]
        most = float(np.bincount(self._ranks, of).max())
        return max(most, self._copying([s.copy or 0.0 for s in costs.stages])) if self.of.offloads else most

    def _copying(self, copy: Iterable[float]) -> float:
        """Return the seconds of a batch in which the busiest rank copies activations, given those of a copy."""
        made = self._known.copies(self.of.schedule)
        return max(float(each) * counts.of_batch for each, counts in zip(copy, made, strict=True))

    def costs(self, cuts: npt.NDArray[np.intp], activations: Sequence[ActivationMemory]) -> Costs:
        """Return the times of stages and messages; all messages take the time of the longest.

        Args:
            cuts: where stages begin, and where the last one ends.
            activations: what each rank does with them.
        """
        of, (times, transfer, parameters) = self.of, self._stage_times(cuts, activations)
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

    def _stage_times(
        self, cuts: npt.NDArray[np.intp], activations: Sequence[ActivationMemory]
    ) -> tuple[Floats, float, float]:
        """Return seconds of stages, rows as `StageCost` has them, and of the longest message; bytes of the largest.

        There is a row for copies where any rank may offload.
        """
        of, chain = self.of, self._chain
        forward, first, second = (np.diff(sums[cuts]) * self._slow for sums in self._passes)
        first = first + forward * self._which(activations, ActivationMemory.RECOMPUTED)
        crossing, between = chain.crossing[cuts[self._between]], np.array(self._between, int)
        ends = np.bincount([*between - 1, *between], minlength=of.stages)  # messages of a pass
        work = self._devices.message_work(float(crossing.max(initial=0.0)), of.depth * of.width)
        more = ends * work + self._devices.between
        forward, first = forward + more, first + more
        second = second + self._devices.between if of.method.halved else second
        parameters = float(chain.parameters[cuts[:-1], cuts[1:]].max())
        transfer = float((crossing / self._along).max(initial=0.0))
        rows = [forward, first, second, np.diff(self._steps[cuts]) * self._slow]
        if of.offloads:
            assert self._devices.host is not None, "no bandwidth to the host is known"
            moved = chain.sizes[HeldKind.MOVED][cuts[:-1], cuts[1:]]
            rows.append(self._which(activations, ActivationMemory.OFFLOADED) * moved / self._devices.host)
        return np.array(rows), transfer, parameters

    def _which(self, activations: Sequence[ActivationMemory], does: ActivationMemory) -> npt.NDArray[np.bool_]:
        """Return the stages whose ranks do one thing with their activations."""
        return np.array([activations[rank] is does for rank in self._ranks])

    def least_batch(self, cuts: Cuts, activations: Sequence[ActivationMemory]) -> float:
        """Return the seconds that a batch takes at least with these cuts, as `Candidate.of_ranks` says."""
        of, (times, transfer, parameters) = self.of, self._stage_times(np.array(cuts), activations)
        forward, first, second, steps, *copies = times
        ranks = np.arange(of.depth)
        own, hop = forward + first, 2 * (transfer + self._devices.latency)
        busy, path, step = (np.bincount(self._ranks, each).astype(float) for each in (own + second, own, steps))
        before = (np.cumsum(own) - own)[: of.depth] + ranks * hop + (ranks > 0) * step[0]
        after = np.cumsum(own[::-1])[::-1]  # of a stage and those behind it
        through, behind = after[: of.depth] + (of.hops - ranks) * hop, (after - own)[-of.depth :] + ranks[::-1] * hop
        work = RankWork(busy, path, forward[: of.depth], step, before, through, behind)
        sums = of.after(of.sums(parameters, self._across))
        lanes = [of.microbatches * of.messages * transfer, *map(self._copying, copies)]
        least = max(float(of.of_ranks(work, ranks).max()), *lanes)
        return least + sums if of.method.flushes else max(least, sums)

    def ratings(self, found: TimedCuts) -> list[StageRating]:
        """Return what stages cost, between cuts."""
        fit = self._fitting if self._devices.memory is not None else self.fit_of_span()
        of, cuts, width = self.of, found.cuts, self.of.width
        seconds = found.batch / of.sized.microbatches
        again_too = [
            (found.activations[rank] is ActivationMemory.RECOMPUTED)
            * (self._passes.forward[last] - self._passes.forward[first])
            for rank, (first, last) in zip(self._ranks, pairwise(cuts), strict=True)
        ]
        busy = (np.diff(self._passes.busy[list(cuts)]) + again_too) * self._slow
        updates = np.diff(self._steps[list(cuts)]) * self._slow / of.sized.microbatches
        held, ratings = self._held(fit, found), []
        for stage, rank in enumerate(self._ranks):
            own, does = self.memory.on[rank], found.activations[rank]
            idle = seconds - float((busy[own] / width + updates[own]).sum())
            parts = {"compute": float(busy[stage]) / width, "updates": float(updates[stage])}
            parts["bubble"] = max(idle, 0.0) / len(own)
            ratings.append(StageRating(parts["compute"], parts, held[rank], fit.held_on_host(rank, cuts, does)))
        return ratings
