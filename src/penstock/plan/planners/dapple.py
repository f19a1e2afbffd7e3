"""DAPPLE's planner: stages with replicas of their own, for the latency of a synchronous batch.

As published (Fan et al., arXiv 2007.01045, sec. 4): for each number of stages a dynamic program over (layers, devices)
finds the cut whose slowest stage, or message, is fastest, on all devices; the latency decides among the numbers of
stages. It is not exact, since the latency is not the slowest stage. `plan_for_dapple_cost` tries every plan if they are
few, and otherwise goes on from the published answers, and those on fewer devices, as long as moving a layer or a device
to another stage helps.

Layers are cut along one topological order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.dapple_cost import DappleCost, check_halves
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.layer_row import Floats, border_bytes, running_sums
from penstock.plan.stages.planned import Plan, PlannedStage, Search

_MOST_PLANS = 20_000  # that are all tried
_MOST_WORK = 2e9  # cells of the dynamic program
_UNEVEN = "stages with different numbers of replicas are computed here; Pipeline cannot run them"


def plan_as_dapple(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the plan of the published search, on all devices.

    Raises:
        ConfigError: the profile does not tell forward and backward apart, or the search would be too large.
    """
    search = DappleSearch(graph, devices, microbatches)
    found = [plan for plan in search.balanced([devices.count]) if math.isfinite(plan.rating.seconds)]
    return _answer(found)


def plan_for_dapple_cost(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the least latency that is found; the least that there is for small graphs.

    Raises:
        ConfigError: as `plan_as_dapple`.
    """
    search = DappleSearch(graph, devices, microbatches)
    if search.count() <= _MOST_PLANS:
        return _answer([min(search.all(), key=_seconds)])
    started = [plan for plan in search.balanced(range(1, devices.count + 1)) if math.isfinite(plan.rating.seconds)]
    if not started:
        return _answer([])
    best = search.improved(min(started, key=_seconds))
    return _answer([replace(best, notes=(*best.notes, "the best that was found, not proven to be the best there is"))])


def _seconds(plan: Plan) -> float:
    return plan.rating.seconds


def _answer(plans: list[Plan]) -> Search:
    """Return the best of some plans."""
    fitting = [plan for plan in plans if math.isfinite(plan.rating.seconds)]
    if not fitting:
        fault = next((plan.rating.fault for plan in plans), "no division into stages fits")
        return Search(None, why=f"no plan fits: {fault}")
    best = min(fitting, key=_seconds)
    if len({stage.replicas for stage in best.stages}) > 1:
        best = replace(best, notes=(*best.notes, _UNEVEN))
    return Search(best)


class DappleSearch:
    """Plans of a graph along one topological order."""

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        check_halves(graph)
        self._graph, self._devices, self._m = graph, devices, microbatches
        self._cost, self._order = DappleCost(graph, devices, microbatches), graph.order
        self._notes = () if graph.order == tuple(range(len(graph.layers))) else ("cuts are along one order of layers",)

    def plan(self, cuts: tuple[int, ...], replicas: tuple[int, ...]) -> Plan:
        """Return a plan, rated."""
        stages = tuple(
            PlannedStage(tuple(sorted(self._order[first:last])), count)
            for (first, last), count in zip(pairwise(cuts), replicas, strict=True)
        )
        return Plan(DappleCost.name, stages, self._cost.rate(stages), self._notes)

    def count(self) -> int:
        """Return how many plans there are."""
        layers, most = len(self._order), self._devices.count
        if most > 64:
            return _MOST_PLANS + 1
        return sum(math.comb(layers - 1, s - 1) * math.comb(most, s) for s in range(1, min(layers, most) + 1))

    def all(self) -> Iterator[Plan]:
        """Yield every plan, also those that do not fit."""
        layers, most = len(self._order), self._devices.count
        for stages in range(1, min(layers, most) + 1):
            for inner in combinations(range(1, layers), stages - 1):
                for ends in combinations(range(1, most + 1), stages):
                    replicas = tuple(after - before for before, after in pairwise((0, *ends)))
                    yield self.plan((0, *inner, layers), replicas)

    def improved(self, plan: Plan) -> Plan:
        """Return the plan after all moves of a layer or a device between two stages that help."""
        while True:
            better = min(self._neighbours(plan), key=_seconds, default=plan)
            if better.rating.seconds >= plan.rating.seconds * (1 - 1e-12):
                return plan
            plan = better

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plans that differ by one move."""
        sizes = [len(stage.layers) for stage in plan.stages]
        cuts = [0, *np.cumsum(sizes).tolist()]
        replicas = [stage.replicas for stage in plan.stages]
        for at in range(1, len(cuts) - 1):
            for step in (-1, 1):
                moved = [*cuts[:at], cuts[at] + step, *cuts[at + 1 :]]
                if moved[at - 1] < moved[at] < moved[at + 1]:
                    yield self.plan(tuple(moved), tuple(replicas))
        for giver in range(len(replicas)):
            for taker in range(-1, len(replicas)):
                given = list(replicas)
                given[giver] -= 1
                if taker >= 0:
                    given[taker] += 1
                if taker != giver and given[giver] > 0:
                    yield self.plan(tuple(cuts), tuple(given))

    def balanced(self, counts: range | list[int]) -> Iterator[Plan]:
        """Yield, for each number of stages and of devices, the plan whose slowest block is fastest.

        Raises:
            ConfigError: the search would be too large.
        """
        layers, most = len(self._order), self._devices.count
        deepest = min(layers, most)
        work = float(deepest) * most * most * (layers + 1) ** 2
        if work > _MOST_WORK:
            raise ConfigError(
                f"planner 'dapple' would look at {work:.2g} cells for {layers} layers on {most} devices, more than "
                f"{_MOST_WORK:.0e}; merge layers, or plan for fewer devices"
            )
        blocks = self._blocks()
        for stages in range(1, deepest + 1):
            trail = self._balance(blocks, stages)
            for count in counts:
                found = self._traced(trail, stages, count)
                if found is not None:
                    yield self.plan(*found)

    def _blocks(self) -> Floats:
        """Return the larger one of a stage and of the messages before it: (replicas - 1, first layer, last layer)."""
        sums, crossing = running_sums(self._graph.layers[n].seconds for n in self._order), border_bytes(self._graph)
        compute = sums[None, :] - sums[:, None]
        messages = np.broadcast_to(2 * crossing[:, None] / self._devices.bandwidth, compute.shape)
        replicas = np.arange(1, self._devices.count + 1)[:, None, None]
        later = np.triu(np.ones_like(compute, dtype=bool), 1)
        return np.where(later, np.maximum(compute, messages) / replicas, np.inf)

    def _fitting(self, flight: int) -> npt.NDArray[np.bool_]:
        """Return which stages fit with so many microbatches in flight: (first layer, last layer)."""
        ways = [self._graph.layers[number].ways[0] for number in self._order]
        sums = running_sums(way.memory + flight * way.memory_per_microbatch for way in ways)
        limit = math.inf if self._devices.memory is None else self._devices.memory * TOLERANCE
        return np.asarray(sums[None, :] - sums[:, None] <= limit)

    def _balance(self, blocks: Floats, stages: int) -> list[tuple[npt.NDArray[np.intp], Floats]]:
        """Return for each stage which (replicas, first layer) is best for (devices, last layer), and its cost."""
        most, width = blocks.shape[0], blocks.shape[1]
        reached = np.full((most + 1, width), np.inf)
        reached[0, 0] = 0.0
        trail = []
        for stage in range(stages):
            fits = self._fitting(min(stages - stage, self._m))
            following = np.full_like(reached, np.inf)
            chosen = np.zeros(reached.shape, dtype=np.intp)
            for count in range(1, most + 1):
                times = np.where(fits, blocks[count - 1], np.inf)
                through = np.maximum(reached[: most + 1 - count, :, None], times[None])
                first, least = through.argmin(axis=1), through.min(axis=1)
                better = least < following[count:]
                following[count:][better] = least[better]
                chosen[count:][better] = (count * width + first)[better]
            trail.append((chosen, following))
            reached = following
        return trail

    def _traced(
        self, trail: list[tuple[npt.NDArray[np.intp], Floats]], stages: int, count: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the cuts and replicas of the best plan on so many devices; None if there is none."""
        layers = len(self._order)
        if not math.isfinite(trail[-1][1][count, layers]):
            return None
        cuts, replicas, last = [layers], list[int](), layers
        for stage in range(stages - 1, -1, -1):
            used, first = divmod(int(trail[stage][0][count, last]), layers + 1)
            cuts.append(first)
            replicas.append(used)
            count, last = count - used, first
        return tuple(reversed(cuts)), tuple(reversed(replicas))
