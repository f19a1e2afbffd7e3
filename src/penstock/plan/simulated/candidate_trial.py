"""One configuration, tried: cut where it fits and is fastest, and simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from penstock.byte_sizes import human_bytes
from penstock.errors import CapabilityError, ScheduleError
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.candidate_bounds import CandidateBounds
from penstock.plan.candidates.candidate_times import CandidateTimes, waiting_times
from penstock.plan.candidates.planned_methods import ActivationMemory, least_microbatches
from penstock.plan.candidates.rank_memory import ACTIVATIONS, CandidateMemory, Cuts, RankWays
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.simulated.fitting_cuts import FittingCuts, LeastMemory, TimedCuts, place_of
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.layer_row import near_cuts
from penstock.plan.stages.planned import BUBBLE, COMPUTE, UPDATES, StageRating
from penstock.simulate.memory.held import HeldKind

NAME = "simulated"
_MOST_PASSES = 1 << 16  # forwards of a schedule that is simulated
_MOST_THAT_GROW = 1 << 14  # the same where ranks hold more microbatches, the more there are

_ROUNDING = 1 + 1e-8  # of times that are compared

_Found = TypeVar("_Found")


@dataclass
class _PassedOver:
    """Cuts that fit by what ranks hold, and were not taken.

    Attributes:
        slower: least seconds of a batch with those that take longer than the best plan so far.
        late: there are some whose copies to the host take so long that ranks have no room.
    """

    slower: list[float] = field(default_factory=list)
    late: bool = False

    def in_words(self, best: float, samples: int) -> str:
        """Return why none was taken, where that is so; `best` is the seconds of a batch of the best plan so far."""
        why = "copies to the host take so long that too many activations wait for them"
        if not self.slower:
            return f"does not fit: {why}"
        but = f", as with faster cuts {why}" if self.late else ""
        least, so_far = min(self.slower) / samples, best / samples
        return f"takes {least:.4g} s per sample at least with the cuts tried{but}, the best plan so far {so_far:.4g}"


class CandidateTrial:
    """One configuration: cut, proven and simulated.

    Attributes:
        of: the configuration.
        uncut: what it takes at least, however it is cut.

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
        self.uncut = CandidateBounds(candidate, chain, devices)
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

    @cached_property
    def memory(self) -> CandidateMemory:
        """What its ranks hold; of most candidates the first bound says enough, so it is found when it is asked for."""
        return CandidateMemory(self.of, self._chain, self._devices, self._known)

    @cached_property
    def times(self) -> CandidateTimes:
        """How long it takes with given cuts."""
        return CandidateTimes(self.of, self._chain, self._devices, self._known)

    def bounds(self) -> Iterator[float]:
        """Yield the seconds per sample that it takes at least where it fits: by forecast, then by what ranks hold.

        Raises:
            NoPlanError: it does not fit, or there is no schedule.
        """
        of, least = self.of, least_microbatches(self.of.method, self.of.depth)
        most = _MOST_THAT_GROW if of.method.grows else _MOST_PASSES
        if of.stages * of.played[-1] > most:
            raise NoPlanError(
                of,
                f"{of.stages} x {of.played[-1]:,} forwards are too many to play them here ({most:,}); make "
                "batches smaller, or give a profile of larger microbatches",
                refused=True,
            )
        if of.microbatches < least:
            raise NoPlanError(of, f"refused: it needs at least {least} microbatches for each pipeline", refused=True)
        bound = self.uncut.seconds_per_sample()
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
        found = self._scheduled(lambda: self._fastest(best[0] * self.of.samples))
        if self.place(found) >= best:
            raise NoPlanError(self.of, f"takes {found.seconds:.4g} s per sample, the best plan so far {best[0]:.4g}")
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
            raise NoPlanError(self.of, f"refused: {str(error).splitlines()[0]}", refused=True) from None

    def held_on_average(self) -> float:
        """Return the bytes that a device holds on average at least."""
        return self._fit_once(scheduled=False).least()

    def least_memory(self) -> LeastMemory | None:
        """Return with how much memory of each device it fits, and what the fullest one holds then.

        None if the memory of the host has no room.

        Raises:
            ScheduleError: there is no schedule.
            CapabilityError: what ranks hold is not predicted.
        """
        return self._fit_once(scheduled=True).least_memory()

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
            raise NoPlanError(
                self.of, "takes as long as without: no rank has room for its activations only if it moves them"
            )
        if batch is not None:
            return (batch + self.uncut.after() * of.method.flushes) / of.samples
        average, room = self._fitting.least(), sum(of.limits(self._devices)) / of.depth
        least, limit = human_bytes(average, 2), human_bytes(room, 2)
        if average > room:
            raise NoPlanError(self.of, f"does not fit: at least {least} per device on average, but it has {limit}")
        many, host = f"{least} of {limit} per device at least on average", ""
        if (of.away or of.offloads) and self._devices.host_memory is not None:
            host = f" there, or than {human_bytes(self._devices.host_memory, 2)} on the host,"
        raise NoPlanError(self.of, f"does not fit: {many}, but some stage takes more{host} however the blocks are cut")

    def _fastest(self, best: float) -> TimedCuts:
        """Find the fastest cuts that fit: of all if they are few, otherwise of those near, as long as that helps.

        Args:
            best: seconds of a batch of the best plan so far; cuts that take longer at least are not simulated.
        """
        fit, passed = self._fitting, _PassedOver()
        assert fit.first is not None, "a bound is known, so some cuts fit"
        if fit.are_few():
            found = self._faster([fit.first], None, best, passed)
            found = self._faster(fit.all(), found, best, passed) or found
        else:
            first = self._no_slower(fit.first, best)
            found = self._faster([first], None, best, passed)
            better = found or self._faster(near_cuts(first), None, best, passed)
            while better is not None:
                found, better = better, self._faster(near_cuts(better.cuts), better, best, passed)
        if found is None:
            raise NoPlanError(self.of, passed.in_words(best, self.of.samples))
        return found

    def _no_slower(self, cuts: Cuts, best: float) -> Cuts:
        """Return the next cuts near some, step by step, that may take no longer than the best plan so far.

        Where there are none, the last ones from which no step makes the batch shorter, at least.
        """
        least = self._least_batch(cuts)
        while least > best * _ROUNDING:
            nearest, step = min((self._least_batch(each), each) for each in (cuts, *near_cuts(cuts)))
            if nearest >= least:
                break
            cuts, least = step, nearest
        return cuts

    def _least_batch(self, cuts: Cuts) -> float:
        """Return the seconds that a batch takes at least with cuts; infinite if they do not fit."""
        activations = self._fitting.activations(cuts)
        return math.inf if activations is None else self.times.least_batch(cuts, activations)

    def _faster(
        self, trials: Iterable[Cuts], than: TimedCuts | None, best: float, passed: _PassedOver
    ) -> TimedCuts | None:
        """Return the best of some cuts; None if it is no better than what was found.

        Args:
            trials: the cuts.
            than: what was found.
            best: seconds of a batch of the best plan so far.
            passed: gets the cuts that are passed over.
        """
        limit = (math.inf, 0) if than is None else place_of(than.batch, than.activations)
        fitting = [(cuts, does) for cuts in trials if (does := self._fitting.activations(cuts)) is not None]
        leasts = [self.times.least_batch(*each) for each in fitting]
        passed.slower += [least for least in leasts if least > best * _ROUNDING]
        several = [
            each
            for each, least in zip(fitting, leasts, strict=True)
            if least <= best * _ROUNDING and place_of(least, each[1]) < limit
        ]
        times = self.times.batch_times(several) if several else []
        for place, n in sorted((place_of(times[n], does), n) for n, (_, does) in enumerate(several)):
            (cuts, activations), batch = several[n], times[n]
            if place >= limit:
                break
            found = TimedCuts(cuts, activations, batch, batch / self.of.samples)
            if not self.of.offloads or self._fits_in_time(found):
                return found
            passed.late = True
        return None

    def _fits_in_time(self, found: TimedCuts) -> bool:
        """Return whether ranks have room for activations that are not in the memory of the host yet."""
        limits = self.of.limits(self._devices)
        return all(held <= limit for held, limit in zip(self._held(self._fitting, found), limits, strict=True))

    def _held(self, fit: FittingCuts, found: TimedCuts) -> list[float]:
        """Return the most bytes of each rank, with activations for whose copies there has not been time."""
        late = self._late(found)
        return [fit.held(r, found.cuts, does) + late.get(r, 0.0) for r, does in enumerate(found.activations)]

    def _held_by_kind(self, fit: FittingCuts, found: TimedCuts) -> list[dict[str, float]]:
        """Return the same by kind."""
        kinds = [fit.held_by_kind(rank, found.cuts, does) for rank, does in enumerate(found.activations)]
        for rank, nbytes in self._late(found).items():
            kinds[rank][ACTIVATIONS] = kinds[rank].get(ACTIVATIONS, 0.0) + nbytes
        return kinds

    def _late(self, found: TimedCuts) -> dict[int, float]:
        """Return by rank the bytes of activations that are on the device for as long as copies are late."""
        cuts, activations = found.cuts, found.activations
        if ActivationMemory.OFFLOADED not in activations:
            return {}
        moved = self._chain.sizes[HeldKind.MOVED]
        late = self.times.not_gone(cuts, activations).items()
        return {
            rank: more * float(moved[cuts[rank], cuts[rank + 1]])
            for rank, more in late
            if more and activations[rank] is ActivationMemory.OFFLOADED
        }

    def ratings(self, found: TimedCuts) -> list[StageRating]:
        """Return what stages cost, between cuts."""
        fit = self._fitting if self._devices.memory is not None else self.fit_of_span()
        of, cuts, width = self.of, found.cuts, self.of.width
        seconds = found.batch / of.sized.microbatches
        busy, updates = self.times.work(cuts, found.activations)
        updates, batch = updates / of.sized.microbatches, waiting_times(self.times, cuts, found.activations)
        waits = {name: wait / of.sized.microbatches for name, wait in batch.items()}
        held, kinds, ratings = self._held(fit, found), self._held_by_kind(fit, found), list[StageRating]()
        for stage, rank in enumerate(of.method.ranks(of.depth)):
            own, does = self.memory.on[rank], found.activations[rank]
            idle = seconds - float((busy[own] / width + updates[own]).sum()) - sum(waits.values())
            parts = {COMPUTE: float(busy[stage]) / width, **{name: wait / len(own) for name, wait in waits.items()}}
            parts |= {UPDATES: float(updates[stage]), BUBBLE: max(idle, 0.0) / len(own)}
            on_host = fit.held_on_host(rank, cuts, does)
            ratings.append(StageRating(parts[COMPUTE], parts, held[rank], on_host, kinds[rank]))
        return ratings
