"""The fastest run that fits: method, depth, width, microbatch size and recompute, rated by simulating the schedule.

For every candidate a lower bound comes first: all compute evenly divided, with fill and drain where the method
flushes. Candidates are taken in the order of their bounds, until the next bound is no better than the best plan. Each
is cut where its slowest stage is fastest and every stage fits, by what its proof will say; if that is promising, it is
proven, what it holds is played (`penstock.simulate.memory`), it is cut again by that, and simulated: what one more
batch takes in a long run. Other cuts are simulated, too: all of them if they are few, otherwise those that differ by
one block, as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from penstock.errors import ConfigError
from penstock.plan.planners.block_chain import BlockChain
from penstock.plan.planners.candidate_trial import Candidate, CandidateTrial, KnownSchedules
from penstock.plan.planners.foreseen import METHODS
from penstock.plan.planners.two_bw import Sized, widths
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.devices import Devices
from penstock.plan.stages.planned import Plan, Skipped


def simulated_plans(
    sizes: Mapping[int, Sized], devices: Devices, optimizer_copies: float = 2.0, decides: bool = True
) -> tuple[list[Plan], list[Skipped]]:
    """Return the best plan of every method that fits, fastest first, and the classes that were skipped.

    Args:
        sizes: the graph at each microbatch size, by samples.
        devices: not all need be used.
        optimizer_copies: what the optimizer holds, in copies of the parameters, where the profile does not say; 2 for
            Adam.
        decides: updates wait for a decision of all stages, as with `max_grad_norm` of `penstock train`.

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
    candidates = []
    for each in _candidates(sizes, devices):
        total = float(chains[each.sized.samples, each.recompute].seconds[-1])
        candidates.append((each.bound(total / each.depth, total), str(each), each))
    best, skipped, refused = dict[str, Plan](), list[Skipped](), list[Skipped]()
    schedules = KnownSchedules(decides)
    for bound, name, each in sorted(candidates, key=lambda found: found[:2]):
        known = best.get(each.method)
        if known is not None and bound >= known.seconds_per_sample:
            skipped.append(Skipped(name, f"takes {bound:.4g} s per sample at least, the best plan so far " +
                                   f"{known.seconds_per_sample:.4g}"))  # fmt: skip
            continue
        chain = chains[each.sized.samples, each.recompute]
        plan = CandidateTrial(each, chain, devices, schedules).plan(
            math.inf if known is None else known.seconds_per_sample
        )
        if isinstance(plan, Skipped):
            refused.append(plan)
        elif known is None or plan.seconds_per_sample < known.seconds_per_sample:
            best[each.method] = plan
    return sorted(best.values(), key=lambda plan: plan.seconds_per_sample), [*refused, *skipped]


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


def _candidates(sizes: Mapping[int, Sized], devices: Devices) -> Iterator[Candidate]:
    """Return all configurations."""
    for sized in sizes.values():
        for depth in range(1, min(devices.count, len(sized.graph.layers)) + 1):
            for width in widths(devices.count // depth, 1, sized.microbatches):
                for method in METHODS if depth > 1 else METHODS[:1]:
                    yield Candidate(sized, method, depth, width, False)
                    if devices.memory is not None:
                        yield Candidate(sized, method, depth, width, True)
