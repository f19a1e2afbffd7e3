"""How long one configuration takes with given cuts: its stages, its messages, and one more batch of a long run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from penstock.plan.candidates.block_chain import BlockChain, Floats, PassSums
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.candidate_bounds import RankWork, least_of_ranks
from penstock.plan.candidates.planned_methods import SEARCHED, ActivationMemory
from penstock.plan.candidates.rank_memory import Cuts
from penstock.plan.candidates.schedule_cache import KnownSchedules, ScheduleKey
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import COPIES, CORES, LINKS, SUMS
from penstock.schedule.machine.shared_machine import SharedCores
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.order_options_from_costs import with_search_options
from penstock.simulate.sharding_traffic import Network

_SAME = 1e-3  # by how much the times of rounds of microbatches may differ
_NO_BYTES = 1e-30  # of a network, which has to carry something


class CandidateTimes:
    """The times of one configuration with given cuts.

    Attributes:
        of: the configuration.

    Args:
        candidate: which.
        chain: its blocks.
        devices: to plan for.
        known: schedules of this candidate and others.
    """

    def __init__(self, candidate: Candidate, chain: BlockChain, devices: Devices, known: KnownSchedules) -> None:
        self.of, self._chain, self._devices, self._known = candidate, chain, devices, known
        self._ranks = candidate.method.ranks(candidate.depth)  # of each stage

    @cached_property
    def _passes(self) -> PassSums:
        return self.of.passes_of(self._chain)

    @cached_property
    def _between(self) -> list[int]:
        """The cuts between ranks."""
        return [s for s in range(1, self.of.stages) if self._ranks[s - 1] != self._ranks[s]]

    @cached_property
    def _slow(self) -> Floats:
        """How many times as long as the profile says each stage takes."""
        slow: Floats = 1 / self.of.speeds[list(self._ranks)]
        return slow

    @cached_property
    def _steps(self) -> Floats:
        """Seconds of updates of the first 0, 1, .. blocks, without what a stage takes besides them."""
        return self.of.updates(self._chain, self._devices)

    @cached_property
    def _along(self) -> Floats:
        """Bytes per second between ranks, of the messages at each cut."""
        pairs = [(self._ranks[stage - 1], self._ranks[stage]) for stage in self._between]
        return self.of.links(self._devices).along(pairs)

    def batch_times(self, several: Sequence[tuple[Cuts, Sequence[ActivationMemory]]]) -> list[float]:
        """Return what one more batch of a long run takes, for cuts and what ranks do with their activations.

        Short spans may show less than the busiest rank or lane of copies takes, as long as the others catch up. Of more
        microbatches than are played each further round takes as long as the last one that is.

        Raises:
            NoPlanError: these rounds do not take the same time.
        """
        costs = [self.costs(np.array(cuts), activations) for cuts, activations in several]
        return self.batch_times_at(costs, [self.schedule(activations) for _, activations in several])

    def batch_times_at(self, costs: Sequence[Costs], schedules: Sequence[ScheduleKey]) -> list[float]:
        """Return the same at given costs, each of a schedule.

        Raises:
            NoPlanError: rounds of microbatches do not take the same time.
        """
        alike, busiest = dict[ScheduleKey, list[int]](), np.array([self._busiest(each) for each in costs])
        for n, key in enumerate(schedules):
            alike.setdefault(key, []).append(n)
        found, (fewer, batches) = np.zeros((len(self.of.played), len(costs))), self.of.method.spans
        for (key, own), (row, m) in product(alike.items(), enumerate(self.of.played)):
            played = key._replace(microbatches=m)
            short, long = (self._known.span(played, each)([costs[n] for n in own]) for each in (fewer, batches))
            more = [b.makespan - a.makespan for a, b in zip(short, long, strict=True)]
            found[row, own] = np.array(more) / (batches - fewer)
        return list(map(float, np.maximum(self._of_all_rounds(found), busiest)))

    def without_message_work(self) -> CandidateTimes:
        """Return the same where messages take nothing of the cores of their ranks."""
        return CandidateTimes(self.of, self._chain, replace(self._devices, link_work=(0.0, 0.0)), self._known)

    def _of_all_rounds(self, times: Floats) -> Floats:
        """Return what a batch takes, given that with as many microbatches as are played.

        Raises:
            NoPlanError: rounds of microbatches do not take the same time.
        """
        found: Floats = times[-1]
        if len(times) > 1:
            (before, last), (_, fewer, most) = np.diff(times, axis=0), self.of.played
            if (np.abs(last - before) > _SAME * last).any():
                raise NoPlanError(
                    self.of,
                    f"rounds of microbatches do not take the same time by microbatch {most}, so it is not known what "
                    f"{self.of.microbatches:,} of them take; make batches smaller",
                )
            found = found + last * ((self.of.microbatches - most) // (most - fewer))
        return found

    def schedule(self, activations: Sequence[ActivationMemory]) -> ScheduleKey:
        """Return what the schedule is known by if ranks do this with their activations."""
        if not self.of.offloads:
            return self.of.schedule
        away = (stage for stage, rank in enumerate(self._ranks) if activations[rank] is ActivationMemory.OFFLOADED)
        return self.of.schedule._replace(offloaded=tuple(away))

    def costs(self, cuts: npt.NDArray[np.intp], activations: Sequence[ActivationMemory]) -> Costs:
        """Return the times of stages and messages; all messages take the time of the longest.

        Args:
            cuts: where stages begin, and where the last one ends.
            activations: what each rank does with them.
        """
        of, (times, transfer, parameters) = self.of, self._stage_times(cuts, activations)
        network = None
        if of.shards > 1:
            made, carried = self._known.schedule(of.schedule), max(parameters, _NO_BYTES)
            network = Network.of_scatter(made, of.width, carried, of.scatter(carried, self._devices))
        return Costs(
            tuple(StageCost(*each) for each in times.T.tolist()),
            latency=of.latency(self._devices),
            decision=of.decision(self._devices),
            transfer=transfer,
            collective=of.sums(parameters, self._devices)[0],
            network=network,
            cores=None if self._devices.cores is None else SharedCores(of.cores(self._devices)),
        )

    def work(self, cuts: Cuts, activations: Sequence[ActivationMemory]) -> tuple[Floats, Floats]:
        """Return the seconds of each stage: of a microbatch in all its passes, without messages, and of an update."""
        again_too = [
            (activations[rank] is ActivationMemory.RECOMPUTED)
            * (self._passes.forward[last] - self._passes.forward[first])
            for rank, (first, last) in zip(self._ranks, pairwise(cuts), strict=True)
        ]
        busy = (np.diff(self._passes.busy[list(cuts)]) + again_too) * self._slow
        return busy, self._updates(cuts)

    def not_gone(self, cuts: Cuts, activations: Sequence[ActivationMemory]) -> Mapping[int, int]:
        """Return by rank how many more activations are on its device than if copies to the host took no time."""
        batches = self.of.method.spans[1]
        return self._known.not_gone(self.schedule(activations), batches, self.costs(np.array(cuts), activations))

    def _stage_times(
        self, cuts: npt.NDArray[np.intp], activations: Sequence[ActivationMemory]
    ) -> tuple[Floats, float, float]:
        """Return seconds of stages, rows as `StageCost` has them, and of the longest message; bytes of the largest.

        There is a row for copies where any rank may offload.
        """
        of, chain, again = self.of, self._chain, self._which(activations, ActivationMemory.RECOMPUTED)
        where = cuts, again, self._between, self._devices, of.depth * of.width
        forward, first, second = chain.stage_times(self._passes, *where, self._slow)
        parameters = float(chain.parameters[cuts[:-1], cuts[1:]].max())
        transfer = float((chain.crossing[cuts[self._between]] / self._along).max(initial=0.0))
        rows = [forward, first, second, self._updates(cuts)]
        if of.offloads:
            assert self._devices.host is not None, "no bandwidth to the host is known"
            moved = chain.sizes[HeldKind.MOVED][cuts[:-1], cuts[1:]]
            rows.append(self._which(activations, ActivationMemory.OFFLOADED) * moved / self._devices.host)
        return np.array(rows), transfer, parameters

    def _updates(self, cuts: Cuts | npt.NDArray[np.intp]) -> Floats:
        """Return the seconds of an update of each stage."""
        cuts = np.asarray(cuts)
        each = self._devices.update * self._chain.updates[cuts[:-1], cuts[1:]]
        found: Floats = (np.diff(self._steps[cuts]) + each) * self._slow
        return found

    def _which(self, activations: Sequence[ActivationMemory], does: ActivationMemory) -> npt.NDArray[np.bool_]:
        """Return the stages whose ranks do one thing with their activations."""
        return np.array([activations[rank] is does for rank in self._ranks])

    def _busiest(self, costs: Costs) -> float:
        """Return the seconds of a batch in which the busiest rank, or all on shared cores, do their work."""
        of = [s.step + self.of.microbatches * (s.forward + s.backward_input + s.backward_weight) for s in costs.stages]
        shared = 0.0 if costs.cores is None else sum(of) / costs.cores.cores
        most = max(float(np.bincount(self._ranks, of).max()), shared)
        return max(most, self._copying([s.copy or 0.0 for s in costs.stages])) if self.of.offloads else most

    def _copying(self, copy: Iterable[float]) -> float:
        """Return the seconds of a batch in which the busiest rank copies activations, given those of a copy."""
        made = self._known.copies(self.of.schedule)
        return max(float(each) * counts.of_batch for each, counts in zip(copy, made, strict=True))

    def least_batch(self, cuts: Cuts, activations: Sequence[ActivationMemory]) -> float:
        """Return the seconds that a batch takes at least with these cuts, as `least_of_ranks` says."""
        of, (times, transfer, parameters) = self.of, self._stage_times(np.array(cuts), activations)
        forward, first, second, steps, *copies = times
        ranks = np.arange(of.depth)
        own, hops = forward + first, 2 * (transfer + of.hop_latencies(self._devices))
        way = np.concatenate([[0.0], np.cumsum(hops)])  # of messages, there and back, to each stage on another rank
        busy, path, step = (np.bincount(self._ranks, each).astype(float) for each in (own + second, own, steps))
        before = (np.cumsum(own) - own)[: of.depth] + way[ranks] + (ranks > 0) * step[0]
        after = np.cumsum(own[::-1])[::-1]  # of a stage and those behind it
        through = after[: of.depth] + way[-1] - way[ranks]
        behind = (after - own)[-of.depth :] + way[-1] - way[-of.depth :]
        work = RankWork(busy, path, forward[: of.depth], step, before, through, behind)
        sums = of.after(of.sums(parameters, self._devices))
        lanes = [of.microbatches * of.messages * transfer, *map(self._copying, copies)]
        together = float((of.microbatches * busy + step).sum()) / of.cores(self._devices)
        least = max(float(least_of_ranks(of, work, ranks).max()), *lanes)
        return max(least + sums if of.method.flushes else sums, least, together)


# --- what ranks wait for ----------------------------------------------------------------------------------------------


def waiting_times(times: CandidateTimes, cuts: Cuts, activations: Sequence[ActivationMemory]) -> dict[str, float]:
    """Return the seconds of a batch that ranks spend for each cause beside their own work; 0 where it is not known.

    One after the other takes no time: messages, sums and gathers of parallel pipelines, copies to the host, and the
    work of other ranks on the same cores. So what one cause adds, by which a batch would be shorter, is the same for
    all ranks. Where several would each delay a batch alone, as a link that is as busy as the sums beside it, the last
    one counts.

    Args:
        times: of the configuration.
        cuts: where stages begin, and where the last one ends.
        activations: what each rank does with them.
    """
    steps = list(_freed(times, cuts, activations))
    names, costs = [name for name, _ in steps[1:]], [each for _, each in steps]
    try:
        batches = times.batch_times_at(costs, [times.schedule(activations)] * len(costs))
    except NoPlanError:  # rounds of microbatches that are not played differ
        return dict.fromkeys(names, 0.0)
    least = np.minimum.accumulate(batches)
    return dict(zip(names, (least[:-1] - least[1:]).tolist(), strict=True))


def _freed(times: CandidateTimes, cuts: Cuts, activations: Sequence[ActivationMemory]) -> Iterator[tuple[str, Costs]]:
    """Yield the costs as they are, and then without what each cause takes, one cause after the other."""
    of, where = times.of, np.array(cuts)
    now = times.costs(where, activations)
    yield "", now
    if of.depth > 1:
        now = replace(times.without_message_work().costs(where, activations), transfer=0.0, latency=0.0, decision=None)
        yield LINKS, now
    if of.width > 1:
        now = replace(now, collective=0.0, network=None)
        yield SUMS, now
    if of.offloads:
        now = replace(now, stages=tuple(replace(stage, copy=0.0) for stage in now.stages))
        yield COPIES, now
    if now.cores is not None:
        yield CORES, replace(now, cores=None)


# --- orders that are searched for times -------------------------------------------------------------------------------


_MOST_SEARCHED = 1 << 9  # forwards of a batch for which an order is searched, which takes about a second


def searched_for(base: Candidate, chain: BlockChain, devices: Devices, known: KnownSchedules) -> Iterator[Candidate]:
    """Yield the same configuration with orders searched for its times: ZB-2p, and with a limit of memory down to ZB-1p.

    With a limit the microbatches in flight become fewer by a quarter of the ranks at a time. A search knows one time
    for each kind of pass, the mean over ranks, of blocks that are not recomputed; messages are those of even cuts.

    Args:
        base: with the depth, width and microbatch size to take.
        chain: its blocks.
        devices: to plan for.
        known: schedules of other candidates.

    Raises:
        NoPlanError: the halves of backwards are not known, or it has too many passes.
    """
    of = replace(base, method=SEARCHED, sharding="none", away=False, offloads=False)
    if chain.halved is None:
        raise NoPlanError(of, "the profile does not tell the halves of backwards of every layer apart")
    if of.passes > _MOST_SEARCHED:
        raise NoPlanError(of, f"{of.passes:,} passes are too many to search an order for them here ({_MOST_SEARCHED})")
    cuts = np.linspace(0, chain.blocks, of.depth + 1).astype(int)
    costs = CandidateTimes(of, chain, devices, known).costs(cuts, [ActivationMemory.KEPT] * of.depth)
    costs = replace(costs, latency=tuple(each + costs.transfer for each in costs.latencies(of.depth)), transfer=0.0)
    times = with_search_options(SEARCHED.row, None, {}, costs, of.depth)
    sharding = "none" if base.sharding == "none" else "gradients"  # as others with one stage on each rank
    most, step = 2 * of.depth, -(-of.depth // 4)
    for limit in (most,) if devices.memory is None else (*range(most, of.depth, -step), of.depth):
        method = SEARCHED._replace(searched=tuple({**times, "limit": limit}.items()))
        yield replace(of, method=method, sharding=sharding)
