"""The fastest run that fits: method, depth, width, microbatch size and recompute, rated by simulating the schedule.

For every candidate a lower bound comes first: all compute evenly divided, messages and sums of gradients as small as
can be, with fill and drain where the method flushes. Candidates are taken in the order of their bounds, until the next
bound is no better than the best plan. Each is cut where its slowest stage is fastest and every stage fits, by what its
proof will say; if that is promising, its messages are added, what it holds is played (`penstock.simulate.memory`), it
is cut again by that, and simulated: what one more batch takes in a long run. Other cuts are simulated, too: all of them
if they are few, otherwise those that differ by one block, as long as that helps. The schedule of the best plan is
proven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.errors import ConfigError, ScheduleError
from penstock.plan.planners.block_chain import BlockChain
from penstock.plan.planners.candidate_trial import Candidate, CandidateTrial
from penstock.plan.planners.proof_forecast import METHODS
from penstock.plan.planners.schedule_cache import KnownSchedules
from penstock.plan.planners.two_bw import Sized, widths
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan, Skipped


def simulated_plans(
    sizes: Mapping[int, Sized],
    devices: Devices,
    optimizer_copies: float = 2.0,
    decides: bool = True,
    methods: Sequence[str] | None = None,
) -> tuple[list[Plan], list[Skipped]]:
    """Return the best plan of every method that fits, fastest first, and the classes that were skipped.

    Args:
        sizes: the graph at each microbatch size, by samples.
        devices: not all need be used.
        optimizer_copies: what the optimizer holds, in copies of the parameters, where the profile does not say; 2 for
            Adam.
        decides: updates wait for a decision of all stages, as with `max_grad_norm` or fp16 of `penstock train`;
            those of parallel pipelines always do.
        methods: some of `METHODS`; None for all.

    Raises:
        ConfigError: the profile does not tell forward and backward apart, or its layers do not stand in an order in
            which they run.
    """
    for sized in sizes.values():
        _check_chain(sized.graph)
    chains = {
        (s.samples, again): BlockChain(s.graph, again, optimizer_copies)
        for s in sizes.values()
        for again in (False, True)
    }
    search = _Search(chains, devices, KnownSchedules(decides))
    candidates = list(_candidates(sizes, devices, methods or METHODS))
    for method in methods or METHODS:
        search.look_into([each for each in candidates if each.method == method])
    return search.plans()


class _Search:
    """The best plan of every method so far, and what was skipped.

    Args:
        chains: of blocks, by samples of a microbatch and recompute.
        devices: to plan for.
        schedules: of all candidates.
    """

    def __init__(
        self, chains: Mapping[tuple[int, bool], BlockChain], devices: Devices, schedules: KnownSchedules
    ) -> None:
        self._chains, self._devices, self._schedules = chains, devices, schedules
        self._best: dict[str, tuple[Candidate, Plan]] = {}
        self._skipped: list[Skipped] = []
        self._refused: list[Skipped] = []

    def look_into(self, candidates: Sequence[Candidate]) -> None:
        """Look for the best plan among the candidates of one method, in the order of their bounds."""
        bounded = []
        for each in candidates:
            chain = self._chains[each.sized.samples, each.recompute]
            least = max(float(chain.seconds[-1]) / each.depth, float(np.diff(chain.seconds).max()))
            bounded.append((each.bound(chain, self._devices, least), str(each), each, chain))
        best: tuple[Candidate, Plan] | None = None
        for bound, name, each, chain in sorted(bounded, key=lambda found: found[:2]):
            seconds = math.inf if best is None else best[1].seconds_per_sample
            if bound >= seconds:
                self._skipped.append(
                    Skipped(name, f"takes {bound:.4g} s per sample at least, the best plan so far {seconds:.4g}")
                )
                continue
            plan = CandidateTrial(each, chain, self._devices, self._schedules).plan(seconds)
            if isinstance(plan, Skipped):
                self._refused.append(plan)
            elif plan.seconds_per_sample < seconds:
                best = each, plan
        if best is not None:
            self._best[best[0].method] = best

    def plans(self) -> tuple[list[Plan], list[Skipped]]:
        """Return the best plan of every method, the fastest of which has been proven, and what was skipped.

        Where methods are equally fast, as all that flush are on a single stage, they stand in the order of `METHODS`.
        """
        ranked = sorted(self._best.values(), key=lambda found: float(f"{found[1].seconds_per_sample:.9g}"))
        while ranked:
            try:
                self._schedules.proof(ranked[0][0].schedule)
                break
            except ScheduleError as error:
                self._refused.append(Skipped(str(ranked.pop(0)[0]), f"refused: {str(error).splitlines()[0]}"))
        return [plan for _, plan in ranked], [*self._refused, *self._skipped]


def _check_chain(graph: LayerGraph) -> None:
    """Refuse what cannot be cut into consecutive blocks.

    Raises:
        ConfigError: it cannot.
    """
    unknown = next((layer.name for layer in graph.layers if layer.forward is None), None)
    if unknown is not None:
        raise ConfigError(
            f"cost 'simulated' needs forward and backward of each layer apart; layer {unknown!r} has options only"
        )
    if graph.order != tuple(range(len(graph.layers))):
        raise ConfigError("cost 'simulated' cuts consecutive layers: order the profile so that each reads earlier ones")


def _candidates(sizes: Mapping[int, Sized], devices: Devices, methods: Sequence[str]) -> Iterator[Candidate]:
    """Return all configurations."""
    for sized in sizes.values():
        for depth in range(1, min(devices.count, len(sized.graph.layers)) + 1):
            for width in widths(devices.count // depth, 1, sized.microbatches):
                for method in methods:
                    yield Candidate(sized, method, depth, width, False)
                    if devices.memory is not None:
                        yield Candidate(sized, method, depth, width, True)
