"""SPP's planner (Luo et al., arXiv 2204.10562): stages with replicas of their own, on devices that any links join.

Devices are ordered by recursive minimum cuts. For each number of stages a dynamic program over (layers, devices used,
replicas of the last stage) finds the plan along this order whose slowest part is fastest: a stage with its passes of a
batch and the sum of its gradients, or the messages of a batch between two stages. A list schedule decides among the
numbers of stages. Layers are cut along one topological order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.any_links.device_order import Floats, device_order
from penstock.plan.any_links.spp_cost import NAME, SppCost
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.dapple_cost import check_halves
from penstock.plan.stages.layer_row import border_bytes, running_sums
from penstock.plan.stages.planned import Plan, PlannedStage, Search

_MOST_WORK = 2e9  # cells of the dynamic program
_UNEVEN = "stages with different numbers of replicas are computed here; Pipeline cannot run them"


def plan_as_spp(graph: LayerGraph, links: Floats, memory: float | None, microbatches: int) -> Search:
    """Return the plan of the published search, on all devices.

    Args:
        graph: of the model.
        links: bandwidths of all pairs of devices.
        memory: bytes of a device; None for no limit.
        microbatches: M, per batch.

    Raises:
        ConfigError: the profile does not tell forward and backward apart, or the search would be too large.
    """
    check_halves(graph)
    order = device_order(links)
    search = SppSearch(graph, SppCost(graph, links[np.ix_(order, order)], memory, microbatches))
    plans = list(search.balanced())
    fitting = [plan for plan in plans if math.isfinite(plan.rating.seconds)]
    if not fitting:
        return Search(None, why=f"no plan fits: {plans[0].rating.fault}")
    best = min(fitting, key=lambda plan: plan.rating.seconds)
    notes = [f"devices in the order {' '.join(map(str, order))}"]
    notes += [_UNEVEN] if len({stage.replicas for stage in best.stages}) > 1 else []
    return Search(replace(best, notes=tuple(notes)))


class SppSearch:
    """The dynamic program along one order of layers and of devices."""

    def __init__(self, graph: LayerGraph, cost: SppCost) -> None:
        self._graph, self._cost, self._order = graph, cost, graph.order
        layers = [graph.layers[number] for number in graph.order]
        self._seconds, self._parameters = (
            running_sums(getattr(layer, key) for layer in layers) for key in ("seconds", "parameters")
        )
        self._crossing = border_bytes(graph)
        self._later = np.triu(np.ones((len(layers) + 1,) * 2, dtype=bool), 1)

    def balanced(self) -> Iterator[Plan]:
        """Yield, for each number of stages, the plan whose slowest part is fastest, on all devices.

        Raises:
            ConfigError: the search would be too large.
        """
        devices, layers = len(self._cost.links), len(self._order)
        deepest = min(devices, layers)
        if float(deepest) * devices**3 / 6 * (layers + 1) ** 2 > _MOST_WORK:
            raise ConfigError(
                f"planner 'spp' would look at too many plans of {layers} layers on {devices} devices; merge layers, or "
                "plan for fewer devices"
            )
        reached: dict[tuple[int, int], Floats] = {}
        trails = list[dict[tuple[int, int], tuple[Floats, Floats]]]()
        for depth in range(1, deepest + 1):
            reached, trail = self._stage(reached, depth, devices)
            trails.append(trail)
            last = {key: values[layers] for key, values in reached.items() if key[0] == devices}
            key = min(last, key=lambda each: last[each], default=None)
            if key is not None and math.isfinite(last[key]):
                yield self._traced(trails, key, layers)

    def slowest_part(self, first: int, last: int, start: int, count: int, before: int) -> float:
        """Return the time of a stage, or of the messages before it: the larger one, for a batch.

        Args:
            first, last: layers, along the order.
            start, count: its devices.
            before: replicas of the stage before; 0 for the first stage.
        """
        return float(self._parts(start, count, before)[first, last])

    def _parts(self, start: int, count: int, before: int) -> Floats:
        """Return `slowest_part` for all layers."""
        m = self._cost.microbatches
        compute = m * (self._seconds[None, :] - self._seconds[:, None]) / count
        ring = 2 * (count - 1) / count / self._cost.group(start, start + count)
        stage = compute + ring * (self._parameters[None, :] - self._parameters[:, None])
        if before:
            speed = self._cost.between(start - before, start, start + count) * count
            stage = np.maximum(stage, 2 * m * self._crossing[:, None] / speed)
        return np.where(self._later, stage, np.inf)

    def _stage(
        self, reached: dict[tuple[int, int], Floats], depth: int, devices: int
    ) -> tuple[dict[tuple[int, int], Floats], dict[tuple[int, int], tuple[Floats, Floats]]]:
        """Return the least slowest part by (devices used, replicas of the last stage), and where it comes from."""
        found, trail = dict[tuple[int, int], Floats](), dict[tuple[int, int], tuple[Floats, Floats]]()
        width = len(self._later)
        if depth == 1:
            for count in range(1, devices + 1):
                found[count, count] = self._parts(0, count, 0)[0]
            return found, trail
        for (used, before), values in reached.items():
            for count in range(1, devices - used + 1):
                through = np.maximum(values[:, None], self._parts(used, count, before))
                least, first = through.min(axis=0), through.argmin(axis=0).astype(np.float64)
                key = used + count, count
                if key not in found:
                    found[key] = np.full(width, np.inf)
                    trail[key] = np.zeros(width), np.zeros(width)
                better = least < found[key]
                found[key][better] = least[better]
                trail[key][0][better] = first[better]
                trail[key][1][better] = before
        return found, trail

    def _traced(
        self, trails: list[dict[tuple[int, int], tuple[Floats, Floats]]], key: tuple[int, int], last: int
    ) -> Plan:
        """Return a plan by where it comes from."""
        cuts, replicas = [last], [key[1]]
        for trail in reversed(trails[1:]):
            first, before = (int(part[last]) for part in trail[key])
            key, last = (key[0] - key[1], before), first
            cuts.append(first)
            replicas.append(before)
        cuts.append(0)
        ends = pairwise(reversed(cuts))
        stages = tuple(
            PlannedStage(tuple(sorted(self._order[a:b])), count)
            for (a, b), count in zip(ends, reversed(replicas), strict=True)
        )
        return Plan(NAME, stages, self._cost.rate(stages))
