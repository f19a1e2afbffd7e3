"""The fastest run that fits: method, depth, width, microbatch size, sharding, recompute and offload, by simulation.

For every candidate there are lower bounds, each tighter and dearer than the one before: however it is cut, from the
compute of its blocks, messages and sums of gradients as small as can be, and fill and drain where the method flushes;
cut where its stages fit by what its proof will say; and where they fit by what its ranks hold, for which its messages
are added and it is played (`penstock.simulate.memory`). The candidate whose bound is least gets the next one, or is
simulated: what one more batch takes in a long run. That ends where the least bound is no better than the best plan.

A candidate is cut where its slowest stage is fastest, then other cuts are simulated, too: all of them if they are few,
otherwise those that differ by one block, as long as that helps. Ranks recompute where their stages do not fit
otherwise, or move activations to the host. The schedule of the best plan is proven.

The usual methods have a best plan each. The others, whose ranks have several stages or whose backwards come in halves,
are tried only where they may be faster than all plans so far whose weights are as late. At last an order is searched
for the ranks of the best plan that flushes (`penstock.plan.candidates.candidate_times`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from penstock.errors import ConfigError, ScheduleError
from penstock.gc_pause import no_collection
from penstock.plan.candidates.block_chain import BlockChain
from penstock.plan.candidates.candidate import Candidate, NoPlanError
from penstock.plan.candidates.candidate_times import searched_for
from penstock.plan.candidates.device_choice import Placement, placements
from penstock.plan.candidates.planned_methods import METHODS, PLANNED, SEARCHED, USUAL, PlannedMethod
from penstock.plan.candidates.schedule_cache import KnownSchedules
from penstock.plan.planners.two_bw import Sized, widths
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.simulated.chosen_plan import chosen_plan, rank_orders
from penstock.plan.simulated.fitting_cuts import TimedCuts, place_of
from penstock.plan.simulated.search_report import memory_excluded, nearest_fit, never_tried, why_not_tried
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.layer_row import is_in_order
from penstock.plan.stages.planned import Search, Skipped
from penstock.schedule.ir.rank_numbers import RankOrder

_MOST_TRIED = 1 << 11  # passes of all candidates of a method that is not one of the usual ones
_MOST_OF_FULL = 1 << 8  # the same of one that is fully sharded, where others fit

_Waiting: TypeAlias = tuple[float, str, int, CandidateTrial, Iterator[float]]
"""A candidate: the seconds per sample that it takes at least, its name, bounds known, its trial, further bounds."""


@no_collection
def simulated_plans(
    sizes: Mapping[int, Sized],
    devices: Devices,
    optimizer_copies: float = 2.0,
    decides: bool = True,
    methods: Sequence[str] | None = None,
) -> Search:
    """Return the best plan of every method that fits, fastest first, and what explains them.

    Args:
        sizes: the graph at each microbatch size, by samples.
        devices: not all need be used.
        optimizer_copies: what the optimizer holds, in copies of the parameters, where the profile does not say; 2 for
            Adam.
        decides: updates wait for a decision of all stages, as with `max_grad_norm` or fp16 of `penstock train`;
            those of parallel pipelines always do.
        methods: names of `METHODS`, and of `SEARCHED`; None for all but those that are tried on request.

    Raises:
        ConfigError: the profile does not tell forward and backward apart, or its layers do not stand in an order in
            which they run.
    """
    for sized in sizes.values():
        _check_chain(sized.graph)
    chains = {s.samples: BlockChain(s.graph, optimizer_copies) for s in sizes.values()}
    search = _Search(chains, devices, KnownSchedules(decides))
    for skipped in never_tried(devices, chains.values(), methods or ()):
        search.refuse(skipped)
    for name in METHODS if methods is None else [name for name in METHODS if name in methods]:
        why = why_not_tried(PLANNED[name], devices, chains.values(), methods)
        if why is None:
            search.look_into(PLANNED[name], _candidates(sizes, devices, PLANNED[name]))
        else:
            search.refuse(Skipped(name, why))
    if methods is None or SEARCHED.name in methods:
        search.look_for_an_order()
    return search.answer()


class _Search:
    """The best plan of every method so far, and what was skipped.

    Args:
        chains: of blocks, by samples of a microbatch.
        devices: to plan for.
        schedules: of all candidates.
    """

    def __init__(self, chains: Mapping[int, BlockChain], devices: Devices, schedules: KnownSchedules) -> None:
        self._chains, self._devices, self._schedules = chains, devices, schedules
        self._best: dict[PlannedMethod, tuple[CandidateTrial, TimedCuts]] = {}
        self._skipped: list[Skipped] = []
        self._refused: list[Skipped] = []
        self._unfit: list[CandidateTrial] = []  # as long as there is no plan
        self._met: dict[str, tuple[float, Candidate]] = {}  # that divide and move nothing, with their first bounds
        self._orders: dict[tuple[int, int, bool, Placement], tuple[RankOrder, ...]] = {}

    def refuse(self, skipped: Skipped) -> None:
        """Note a class that cannot be tried."""
        self._refused.append(skipped)

    def look_into(self, method: PlannedMethod, candidates: Iterable[Candidate]) -> None:
        """Look for the best plan among the candidates of one method.

        The one whose bound is least comes first; it gets a tighter bound and waits again, or is simulated.
        """
        waiting = [each for of in candidates for each in self._waiting(of)]
        usual, tried = method.name in USUAL, 0
        best = (math.inf, 0) if usual else self._best_of(method)
        seconds = best[0]
        most = _MOST_OF_FULL if method.full and seconds < math.inf else _MOST_TRIED
        heapify(waiting)
        while waiting:
            bound, name, known, trial, bounds = heappop(waiting)
            said = f"takes {bound:.4g} s per sample at least, "
            if bound >= seconds and not self._may_be_simpler(trial.of, bound, best):
                self._skipped.append(Skipped(name, f"{said}the best plan so far {seconds:.4g}"))
                if known:
                    self._offer_to_offload(waiting, trial, seconds)
                continue
            if known == 1 and not usual:  # from here on its schedule is needed
                tried += trial.of.passes
                if tried > most:
                    tried -= trial.of.passes
                    self._met.pop(name, None)
                    self._skipped.append(Skipped(name, f"{said}and too many passes to try it beside the usual methods"))
                    continue
            if known == 0 and not (trial.of.away or trial.of.offloads) and trial.of.sharding == "none":
                self._met[name] = bound, trial.of
            if known == 0 and self._may_use_host(trial.of):
                heappush(waiting, self._bounded(trial.twin(away=True)))
            try:
                tighter = next(bounds, None)
                if tighter is not None:
                    heappush(waiting, (max(bound, tighter), name, known + 1, trial, bounds))
                    continue
                found = trial.fastest(best)
            except NoPlanError as error:
                self._refused.append(error.skipped)
                if not error.refused:
                    self._offer_to_offload(waiting, trial, seconds)
                    if not (self._best or trial.of.offloads):  # of copies it depends on time whether there is room
                        self._unfit.append(trial)
                continue
            self._unfit.clear()
            self._best[method], best = (trial, found), trial.place(found)
            seconds = best[0]
            self._offer_to_offload(waiting, trial, seconds)

    def look_for_an_order(self) -> None:
        """Search an order for the ranks of the best plan that flushes and has several of them."""
        flushed = [each for each in self._best.values() if each[0].of.method.flushes and each[0].of.depth > 1]
        if not flushed:
            if self._best:
                said = "it takes its depth and width from another plan that flushes, and none has several ranks"
                self.refuse(Skipped(SEARCHED.name, said))
            return
        base = min(flushed, key=lambda each: each[0].place(each[1]))[0].of
        chain = self._chains[base.sized.samples]
        try:
            candidates = list(searched_for(base, chain, self._devices, self._schedules))
        except NoPlanError as error:
            self.refuse(error.skipped)
            return
        for of in candidates:  # with fewer microbatches in flight it may fit with better cuts
            try:
                self._offer(CandidateTrial(of, chain, self._devices, self._schedules))
                return
            except NoPlanError as error:
                self.refuse(error.skipped)

    def _offer(self, trial: CandidateTrial) -> None:
        """Take a candidate for the best plan of its method.

        Raises:
            NoPlanError: it does not fit, or is no faster than others.
        """
        best = self._best_of(trial.of.method)
        bound = max(trial.bounds())
        if bound >= best[0]:
            raise NoPlanError(trial.of, f"takes {bound:.4g} s per sample at least, the best plan so far {best[0]:.4g}")
        self._best[trial.of.method] = trial, trial.fastest(best)

    def _waiting(self, candidate: Candidate) -> Iterator[_Waiting]:
        """Yield a candidate with its first bound, in every order of ranks that is worth trying."""
        first, *others = self._orders_of(candidate)
        of, chain = replace(candidate, rank_order=first), self._chains[candidate.sized.samples]
        trial = CandidateTrial(of, chain, self._devices, self._schedules)
        yield self._bounded(trial)
        yield from (self._bounded(trial.twin(rank_order=order)) for order in others)

    def _orders_of(self, candidate: Candidate) -> tuple[RankOrder, ...]:
        """Return the orders of ranks that are worth trying, which many candidates have in common."""
        key = candidate.depth, candidate.width, candidate.wraps, candidate.on
        if key not in self._orders:
            self._orders[key] = rank_orders(candidate, self._devices)
        return self._orders[key]

    def _bounded(self, trial: CandidateTrial) -> _Waiting:
        """Return a candidate with its first bound."""
        return trial.uncut.seconds_per_sample(), str(trial.of), 0, trial, trial.bounds()

    def _may_use_host(self, candidate: Candidate) -> bool:
        """Return whether it is tried with optimizer states or activations in the host's memory, too.

        That takes no less, so it comes behind the same one without, and is not made where that is too slow anyway.
        """
        devices = self._devices
        limited = devices.memory is not None and devices.host is not None and not devices.kinds
        return limited and not (candidate.away or candidate.offloads) and candidate.method.name in USUAL

    def _offer_to_offload(self, waiting: list[_Waiting], trial: CandidateTrial, seconds: float) -> None:
        """Have a candidate that is slower than it may be, or does not fit, tried with activations on the host, too."""
        movable = self._chains[trial.of.sized.samples].movable and self._devices.cores is None
        movable = movable and len(trial.of.played) == 1  # of others it is not known how many copies are late
        if movable and self._may_use_host(trial.of) and (copies := trial.least_of_copies()) < seconds:
            bound, name, known, twin, bounds = self._bounded(trial.twin(offloads=True))
            heappush(waiting, (max(bound, copies), name, known, twin, bounds))

    @staticmethod
    def _may_be_simpler(candidate: Candidate, bound: float, best: tuple[float, int]) -> bool:
        """Return whether it may take as long as the best plan so far, but for rounding, and move or recompute less."""
        return best[1] > 0 and not (candidate.away or candidate.offloads) and place_of(bound, ())[0] <= best[0]

    def _best_of(self, method: PlannedMethod) -> tuple[float, int]:
        """Return the place of the best plan so far that a method has to beat.

        Of those that flush, if it does; else of those whose weights are late, by no more updates than its own.
        """
        rivals = [each for each in self._best if each.flushes == method.flushes and each.delay <= method.delay]
        known = (self._best[each] for each in rivals)
        return min((trial.place(found) for trial, found in known), default=(math.inf, 0))

    def answer(self) -> Search:
        """Return the best plan of every method, the fastest of which has been proven, and what explains them.

        Where methods are equally fast, as all that flush are on a single stage, those come first of which fewer ranks
        recompute or move something to the host, and otherwise they stand in the order of `METHODS`.
        """
        ranked = sorted(self._best.values(), key=lambda best: best[0].place(best[1]))
        while ranked:
            trial, found = ranked[0]
            of = trial.of
            try:
                self._schedules.proof(trial.times.schedule(found.activations), of.away)
                break
            except ScheduleError as error:
                self._refused.append(Skipped(str(of), f"refused: {str(error).splitlines()[0]}"))
                del ranked[0]
        plans = [chosen_plan(trial, found, self._devices) for trial, found in ranked]
        skipped, excluded = (*self._refused, *self._skipped), None
        if not plans:
            closest = nearest_fit(self._unfit, self._devices) or "see what was skipped, and why"
            return Search(None, skipped, f"no plan fits: {closest}")
        if self._devices.memory is not None:
            seconds = plans[0].seconds_per_sample
            met = [each for each in self._met.values() if each[1].method.name in USUAL or each[1].passes <= _MOST_TRIED]
            excluded = memory_excluded(met, seconds, self._chains, self._devices, self._schedules)
        return Search(plans[0], skipped, excluded=excluded, others=tuple(plans[1:]))


def _check_chain(graph: LayerGraph) -> None:
    unknown = next((layer.name for layer in graph.layers if layer.forward is None), None)
    if unknown is not None:
        raise ConfigError(
            f"cost 'simulated' needs forward and backward of each layer apart; layer {unknown!r} has options only"
        )
    if not is_in_order(graph):
        raise ConfigError("cost 'simulated' cuts consecutive layers: order the profile so that each reads earlier ones")


def _candidates(sizes: Mapping[int, Sized], devices: Devices, method: PlannedMethod) -> Iterator[Candidate]:
    """Return all configurations of a method; on one rank the others are as the usual ones.

    State is divided where memory is limited and the method can. With one stage on each rank the gradients are, too:
    these sums take less time than those of whole gradients, and as many bytes.
    """
    first, level = (1, "gradients") if method.name in USUAL else (2, "gradients" if method.chunks == 1 else "optimizer")
    first, level = (1, "full") if method.full else (first, level)
    for sized in sizes.values():
        for depth in range(first, min(devices.count, len(sized.graph.layers) // method.chunks) + 1):
            for width in widths(devices.count // depth, 1, sized.microbatches):
                for on in placements(devices, depth, width):
                    if not method.full:
                        yield Candidate(sized, method, depth, width, on=on)
                    if devices.memory is not None and width > 1 and method.divides:
                        yield Candidate(sized, method, depth, width, level, on=on)
