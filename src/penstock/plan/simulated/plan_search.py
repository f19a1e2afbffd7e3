"""The fastest run that fits: method, depth, width, microbatch size, sharding and recompute, rated by simulation.

For every candidate a lower bound comes first: all compute evenly divided, messages and sums of gradients as small as
can be, with fill and drain where the method flushes. Candidates are taken in the order of their bounds, until the next
bound is no better than the best plan. Each is cut where its slowest stage is fastest and every stage fits, by what its
proof will say; if that is promising, its messages are added, what it holds is played (`penstock.simulate.memory`), it
is cut again by that, and simulated: what one more batch takes in a long run. Other cuts are simulated, too: all of them
if they are few, otherwise those that differ by one block, as long as that helps. Ranks recompute where their stages do
not fit otherwise. The schedule of the best plan is proven.

The usual methods have a best plan each. The others, whose ranks have several stages or whose backwards come in halves,
are tried only where they may be faster than all plans so far whose weights are as late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from penstock.errors import ConfigError, ScheduleError
from penstock.plan.planners.two_bw import Sized, widths
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.simulated.block_chain import BlockChain
from penstock.plan.simulated.candidate import Candidate
from penstock.plan.simulated.candidate_trial import CandidateTrial
from penstock.plan.simulated.planned_methods import METHODS, PLANNED, USUAL, PlannedMethod
from penstock.plan.simulated.schedule_cache import KnownSchedules
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Plan, Skipped

_MOST_TRIED = 1 << 11  # passes of all candidates of a method that is not one of the usual ones


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
    chains = {s.samples: BlockChain(s.graph, optimizer_copies) for s in sizes.values()}
    search = _Search(chains, devices, KnownSchedules(decides))
    for name in METHODS if methods is None else [name for name in METHODS if name in methods]:
        method = PLANNED[name]
        if method.halved and any(chain.halved is None for chain in chains.values()):
            search.refuse(Skipped(name, "the profile does not tell the halves of backwards of every layer apart"))
        else:
            search.look_into(method, list(_candidates(sizes, devices, method)))
    return search.plans()


class _Search:
    """The best plan of every method so far, and what was skipped.

    Args:
        chains: of blocks, by samples of a microbatch.
        devices: to plan for.
        schedules: of all candidates.
    """

    def __init__(self, chains: Mapping[int, BlockChain], devices: Devices, schedules: KnownSchedules) -> None:
        self._chains, self._devices, self._schedules = chains, devices, schedules
        self._best: dict[PlannedMethod, tuple[Candidate, Plan]] = {}
        self._skipped: list[Skipped] = []
        self._refused: list[Skipped] = []

    def refuse(self, skipped: Skipped) -> None:
        """Note a class that cannot be tried."""
        self._refused.append(skipped)

    def look_into(self, method: PlannedMethod, candidates: Sequence[Candidate]) -> None:
        """Look for the best plan among the candidates of one method, in the order of their bounds."""
        bounded = []
        for each in candidates:
            chain = self._chains[each.sized.samples]
            bounded.append((each.bound(chain, self._devices), str(each), each, chain))
        usual, tried = method.name in USUAL, 0
        seconds = math.inf if usual else self._fastest_of(method.flushes)
        for bound, name, each, chain in sorted(bounded, key=lambda found: found[:2]):
            if bound >= seconds:
                said = f"takes {bound:.4g} s per sample at least, the best plan so far {seconds:.4g}"
            elif tried + each.passes > _MOST_TRIED and not usual:
                said = (
                    f"takes {bound:.4g} s per sample at least, and too many passes to try it beside the usual methods"
                )
            else:
                plan = CandidateTrial(each, chain, self._devices, self._schedules).plan(seconds)
                tried += each.passes
                if isinstance(plan, Skipped):
                    self._refused.append(plan)
                elif plan.seconds_per_sample < seconds:
                    self._best[method], seconds = (each, plan), plan.seconds_per_sample
                continue
            self._skipped.append(Skipped(name, said))

    def _fastest_of(self, flushes: bool) -> float:
        """Return the seconds per sample of the best plan so far whose weights are late, or are not."""
        known = (plan for each, plan in self._best.values() if each.method.flushes == flushes)
        return min((plan.seconds_per_sample for plan in known), default=math.inf)

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


def _candidates(sizes: Mapping[int, Sized], devices: Devices, method: PlannedMethod) -> Iterator[Candidate]:
    """Return all configurations of a method; on one rank the others are as the usual ones.

    State is divided where memory is limited. With one stage on each rank the gradients are, too: these sums take less
    time than those of whole gradients, and as many bytes.
    """
    first, level = (1, "gradients") if method.name in USUAL else (2, "gradients" if method.chunks == 1 else "optimizer")
    for sized in sizes.values():
        for depth in range(first, min(devices.count, len(sized.graph.layers) // method.chunks) + 1):
            for width in widths(devices.count // depth, 1, sized.microbatches):
                yield Candidate(sized, method, depth, width)
                if devices.memory is not None and width > 1:
                    yield Candidate(sized, method, depth, width, level)
