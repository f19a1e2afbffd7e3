"""DawnPiper's planner (Peng et al., arXiv 2505.05856): a cut balanced by compute and memory, and choices of memory.

As published: all devices are used, and the layers are halved again and again, as are their devices. Of two halves the
cut lies between the one that balances compute and the one that balances memory; every cut between them is tried, and
each stage gets the fastest choice of layers that are recomputed or swapped with which it fits. The best cut may lie
elsewhere, since the stages of a half are not balanced yet. Our reading: an odd device goes to the first half; memory is
balanced with all activations kept, for as many microbatches as the stages of a half hold on average; the choice of each
stage is exact, a knapsack.

`plan_for_dawnpiper_cost` finds the least time of all cuts and choices, on any number of devices, by a dynamic program
over (first layer, stages left). Layers are cut along one topological order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.memory_knobs.dawnpiper_cost import SWAP, DawnPiperCost, memory_ways
from penstock.plan.memory_knobs.fitted_stages import FittedStages
from penstock.plan.planners.published_run import recompute_of
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.layer_row import Floats, border_bytes, depths_by_link, row_stages, running_sums
from penstock.plan.stages.planned import Plan, Search
from penstock.plan.stages.two_bw_cost import bandwidths

_MOST_HALVES = 100_000  # runs of layers that are halved
_MOST_STARTS = 500_000  # (first layer, stages left)
_MIXED = (
    "layers of a stage that keep, recompute or swap differently are computed here; in a run a stage recomputes all of "
    "its blocks or none"
)


def plan_as_dawnpiper(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the plan of the published search, on all devices.

    Raises:
        ConfigError: a layer cannot run on a single device, or the search would be too large.
    """
    search = _DawnPiperSearch(graph, devices, microbatches)
    return search.answer(search.halved())


def plan_for_dawnpiper_cost(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the fastest plan of all; the published one, which says so, where they are too many.

    Raises:
        ConfigError: as `plan_as_dawnpiper`.
    """
    search, published = _DawnPiperSearch(graph, devices, microbatches), None
    with suppress(ConfigError):  # the dynamic program may be smaller
        published = search.halved()
    try:
        return search.answer(search.fastest(published))
    except ConfigError:
        if published is None:
            raise
        return search.answer(published, ("all cuts are too many to try: the plan of the published search",))


class _DawnPiperSearch:
    """Plans of a graph along one topological order."""

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        options = memory_ways(graph, devices.host)
        row = [options[number] for number in graph.order]
        self._graph, self._devices, self._m = graph, devices, microbatches
        self._cost, self._border = DawnPiperCost(graph, devices, microbatches), border_bytes(graph)
        self._fitted = FittedStages(row, devices.memory, microbatches)
        self._compute, self._always, self._each = (
            running_sums(getattr(ways[0], key) for ways in row)
            for key in ("seconds", "memory", "memory_per_microbatch")
        )
        self._deepest = min(devices.count, len(row))

    def answer(self, plan: Plan | None, notes: tuple[str, ...] = ()) -> Search:
        """Return a plan with what there is to say about it."""
        if plan is None:
            swapped = "" if self._devices.host else "; give --host-bandwidth, and activations are swapped, too"
            return Search(None, why=f"no plan fits: no cut that was tried does, whatever is recomputed{swapped}")
        mixed = any(SWAP in stage.ways or recompute_of(self._graph, stage) is None for stage in plan.stages)
        notes += (_MIXED,) if mixed else ()
        notes += ("what each layer keeps was found by a heuristic",) if self._fitted.heuristic else ()
        in_order = self._graph.order == tuple(range(len(self._graph.layers)))
        notes += () if in_order or len(plan.stages) == 1 else ("cuts are along one order of layers",)
        return Search(replace(plan, notes=notes))

    def _plan(self, cuts: tuple[int, ...]) -> Plan:
        """Return the plan with a cut."""
        stages = []
        for at, stage in enumerate(row_stages(self._graph, cuts)):
            run = self._fitted.run(cuts[at], cuts[at + 1], len(cuts) - 1 - at)
            names = dict(zip(self._graph.order[cuts[at] : cuts[at + 1]], (way.name for way in run.ways), strict=True))
            stages.append(replace(stage, ways=tuple(names[number] for number in stage.layers)))
        return Plan(DawnPiperCost.name, tuple(stages), self._cost.rate(tuple(stages)))

    # --- as published -------------------------------------------------------------------------------------------------

    def halved(self) -> Plan | None:
        """Return the plan of the published search; None if none that it tries fits.

        Raises:
            ConfigError: it would try too many.
        """
        hop = self._border / bandwidths(self._devices, 1, self._deepest)[1]

        @cache
        def best(first: int, last: int, stages: int, behind: int) -> tuple[float, tuple[int, ...]]:
            if best.cache_info().currsize > _MOST_HALVES:
                raise ConfigError(
                    f"planner 'dawnpiper' would halve {len(hop) - 1} layers in too many ways; merge layers, or plan "
                    "for fewer devices"
                )
            if stages == 1:
                seconds = self._fitted.run(first, last, behind + 1).seconds
                return max(seconds, float(hop[first]), float(hop[last])), (first,)
            left = -(-stages // 2)
            found: tuple[float, tuple[int, ...]] = (math.inf, ())
            for cut, least in self._between(first, last, stages, behind):
                if least >= found[0]:
                    break
                before = best(first, cut, left, behind + stages - left)
                after = best(cut, last, stages - left, behind)
                found = min(found, (max(before[0], after[0]), (*before[1], *after[1])), key=lambda each: each[0])
            return found

        seconds, starts = best(0, len(hop) - 1, self._deepest, 0)
        return None if math.isinf(seconds) else self._plan((*starts, len(hop) - 1))

    def _between(self, first: int, last: int, stages: int, behind: int) -> list[tuple[int, float]]:
        """Return the cuts between the one that balances compute and the one that balances memory.

        Returns:
            Pairs of a cut and the seconds that the slowest stage takes at least with it, ascending in the latter.
        """
        left = -(-stages // 2)
        right = stages - left
        cuts = np.arange(first + left, last - right + 1)

        def shares(before: Floats, after: Floats) -> tuple[Floats, Floats]:
            return (before[cuts] - before[first]) / left, (after[last] - after[cuts]) / right

        flights = ((2 * behind + 2 * right + left + 1) / 2, (2 * behind + right + 1) / 2)  # on average, from the end
        held = [self._always + min(flight, self._m) * self._each for flight in flights]
        both = shares(self._compute, self._compute), shares(held[0], held[1])
        begin, end = sorted(int(np.abs(one - other).argmin()) for one, other in both)
        least = np.maximum(*shares(self._fitted.seconds, self._fitted.seconds))[begin : end + 1]
        return [(int(cuts[begin + at]), float(least[at])) for at in np.argsort(least, kind="stable")]

    # --- the best -----------------------------------------------------------------------------------------------------

    def fastest(self, known: Plan | None) -> Plan | None:
        """Return the fastest plan of all, or the known one if none is faster; None if none fits.

        Raises:
            ConfigError: the search would be too large.
        """
        layers = len(self._border) - 1
        if layers * self._deepest > _MOST_STARTS:
            raise ConfigError(
                f"planner 'dawnpiper' would look at too many stages of {layers} layers on {self._devices.count} "
                "devices; merge layers, or plan for fewer devices"
            )
        best = known
        for bandwidth, depths in depths_by_link(self._devices, self._deepest):
            bound = math.inf if best is None else best.rating.seconds
            cuts = min(self._cuts(self._border / bandwidth, depths, bound), default=None)
            if cuts is not None:
                best = self._plan(cuts[1])
        return best

    def _cuts(self, hop: Floats, depths: list[int], bound: float) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield cuts that are each faster than the one before, and than a bound, with their seconds."""
        layers, ends = len(hop) - 1, list[list[int]]()
        reached = np.full(layers + 1, np.inf)
        reached[layers] = 0.0
        for left in range(1, depths[-1] + 1):
            behind, reached, chosen = reached, np.full(layers + 1, np.inf), [layers] * layers
            for first in range(layers - left, -1, -1):
                reached[first], chosen[first] = self._stage(hop, behind, first, left, bound)
            ends.append(chosen)
            if left in depths and reached[0] < bound:
                bound, cuts = float(reached[0]), [0]
                for each in reversed(ends):
                    cuts.append(each[cuts[-1]])
                yield bound, tuple(cuts)

    def _stage(self, hop: Floats, behind: Floats, first: int, left: int, bound: float) -> tuple[float, int]:
        """Return the least seconds of the slowest stage from a layer on, and where the first stage ends.

        Args:
            hop: seconds of messages over each border.
            behind: the same, with one stage less.
            first: layer.
            left: stages.
            bound: what is slower is not looked for.
        """
        compute = self._fitted.seconds[first + 1 :] - self._fitted.seconds[first]
        others = np.maximum(np.maximum(hop[first], hop[first + 1 :]), behind[first + 1 :])
        least = np.maximum(compute, others)
        best, end = math.inf, len(hop) - 1
        for at in np.argsort(least, kind="stable"):
            if least[at] >= min(best, bound):
                break
            seconds = max(self._fitted.run(first, first + 1 + int(at), left).seconds, float(others[at]))
            if seconds < best:
                best, end = seconds, first + 1 + int(at)
        return best, end
