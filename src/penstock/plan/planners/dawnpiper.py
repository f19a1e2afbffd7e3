"""DawnPiper's planner (Peng et al., arXiv 2505.05856): a cut balanced by compute and memory, and choices of memory.

Stages are on single devices, one each, and a pipeline is as slow as its slowest stage, per microbatch: the compute of
its layers, or the messages on one side of it if they take longer, since they are sent meanwhile. Stage i of p holds
what its layers always take and min(p - i, M) microbatches, i counted from 0. The activations of each layer are

- kept: `plain`, or the first option of the profile on one device;
- recomputed: another option of the profile; or, where forwards are known, one that takes another forward;
- swapped: to the memory of the host, which holds them in place of the device. They leave during the layer's forward and
  return during its backward; what a transfer takes longer than these it costs. The device holds those of one
  microbatch.

The paper fixes that compute is balanced against memory, and that nodes are swapped or recomputed by their cost; the
formulas are our reading. Optimizer states count only where the profile counts them.

As published, all devices are used, and the layers are halved again and again, as are their devices. Of two halves the
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import GraphLayer, LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, bandwidths, held, recompute_of
from penstock.plan.stages.knapsack import best_ways
from penstock.plan.stages.layer_row import (
    Floats,
    border_bytes,
    depths_by_link,
    row_notes,
    row_stages,
    running_sums,
    single_device_options,
)
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating

SWAP = "swap"
"""The name of the way of a layer whose activations are on the host between its passes."""

_MOST_HALVES = 100_000  # runs of layers that are halved
_MOST_STARTS = 500_000  # (first layer, stages left)
_MOST_POINTS = 5_000  # of the front of a run; where there are more, its ways are found by a heuristic
_MOST_STEPS = 100_000  # layers of all runs whose ways are chosen
_MIXED = (
    "layers of a stage that keep, recompute or swap differently are computed here; in a run a stage recomputes all of "
    "its blocks or none"
)


# --- the cost ---------------------------------------------------------------------------------------------------------


def _with_swap(layer: GraphLayer, ways: tuple[Way, ...], host: float) -> tuple[Way, ...]:
    """Return the ways of a layer, and the one in which its activations are swapped if it has any."""
    plain = ways[0]
    nbytes = plain.memory_per_microbatch
    if not nbytes or any(way.name == SWAP for way in ways):
        return ways
    if layer.forward is None:
        late = max(0.0, 2 * nbytes / host - plain.seconds)
    else:
        late = sum(max(0.0, nbytes / host - passed) for passed in (layer.forward, plain.seconds - layer.forward))
    return (*ways, Way(SWAP, 1, plain.seconds + late, plain.parameters, plain.memory + nbytes, 0.0))


class DawnPiperCost(GraphCost):
    """Rates pipelines of single devices. Of links up to two speeds count."""

    name = "dawnpiper"

    @cached_property
    def memory_ways(self) -> list[tuple[Way, ...]]:
        """The ways of each layer on one device: those of the profile, and swapped if there is a host.

        Raises:
            ConfigError: a layer cannot run on a single device.
        """
        found, host = single_device_options(self.graph, "planner 'dawnpiper'"), self.devices.host
        if host is None:
            return found
        return [_with_swap(layer, ways, host) for layer, ways in zip(self.graph.layers, found, strict=True)]

    def options(self, number: int) -> Sequence[Way]:
        return self.memory_ways[number]

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        if any((stage.replicas, stage.tensor, stage.inner) != (1, 1, ()) for stage in stages):
            return self.refused("its stages are not on one device each")
        along = bandwidths(self.devices, 1, len(stages))[1]
        hops = [size / along for size in self.border_bytes(stages)]
        ratings = list[StageRating]()
        for at, stage in enumerate(stages):
            ways = self.ways(stage)
            parts = {"compute": sum(way.seconds for way in ways), "links": max(hops[at : at + 2])}
            memory = held(ways, min(len(stages) - at, self.microbatches))
            ratings.append(StageRating(max(parts.values()), parts, memory))
        return self.rating(ratings, len(stages), lambda: max(rating.seconds for rating in ratings))


# --- the search -------------------------------------------------------------------------------------------------------


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


class _Run(NamedTuple):
    """The ways of a run of layers, and the sum of their seconds; infinite if nothing fits."""

    seconds: float
    ways: Sequence[Way]


class _FittedRuns:
    """The fastest ways of runs of a row of layers so that each fits as a stage, found once for runs that are alike.

    Attributes:
        heuristic: whether some run had too many choices to be exact.
        seconds: at least, up to each layer.
    """

    def __init__(self, options: list[tuple[Way, ...]], limit: float, microbatches: int) -> None:
        self.heuristic, self._steps = False, 0
        self._options, self._limit, self._m = options, limit, microbatches
        self._fastest = [min(ways, key=lambda way: way.seconds) for ways in options]
        numbers = [tuple((way.seconds, way.memory, way.memory_per_microbatch) for way in ways) for ways in options]
        kinds = {each: kind for kind, each in enumerate(dict.fromkeys(numbers))}
        self._kinds = [kinds[each] for each in numbers]
        self._known: dict[tuple[tuple[int, ...], int], tuple[float, tuple[int, ...]]] = {}
        self.seconds: Floats = running_sums(way.seconds for way in self._fastest)

    def run(self, first: int, last: int, left: int) -> _Run:
        """Return the fastest ways of the layers from `first` up to `last`, not included, that fit.

        Args:
            first, last: of the row.
            left: stages in the pipeline from this one on; it holds so many microbatches.
        """
        flight, fastest, options = min(left, self._m), self._fastest[first:last], self._options[first:last]
        if held(fastest, flight) <= self._limit:
            return _Run(float(self.seconds[last] - self.seconds[first]), fastest)
        key = tuple(self._kinds[first:last]), flight
        if key not in self._known:
            self._known[key] = self._chosen(options, flight)
        seconds, chosen = self._known[key]
        return _Run(seconds, [ways[n] for ways, n in zip(options, chosen, strict=False)])

    def _chosen(self, options: list[tuple[Way, ...]], flight: int) -> tuple[float, tuple[int, ...]]:
        """Return the seconds and the numbers of the fastest ways that fit; none if nothing does."""
        if sum(min(held([way], flight) for way in ways) for ways in options) > self._limit:
            return math.inf, ()
        self._steps += len(options)
        if self._steps > _MOST_STEPS:
            raise ConfigError(
                f"planner 'dawnpiper' would choose what to keep for too many stages of {len(self._options)} layers; "
                "merge layers, or plan for more memory"
            )
        seconds = [np.array([way.seconds for way in ways]) for ways in options]
        memory = [np.array([held([way], flight) for way in ways]) for ways in options]
        found, exact = best_ways(seconds, memory, self._limit, _MOST_POINTS)
        self.heuristic |= not exact
        return (math.inf, ()) if found is None else (found.seconds, found.ways)


class _DawnPiperSearch:
    """Plans of a graph along one topological order."""

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        self._graph, self._devices, self._m = graph, devices, microbatches
        self._cost, self._border = DawnPiperCost(graph, devices, microbatches), border_bytes(graph)
        row = [self._cost.memory_ways[number] for number in graph.order]
        self._fitted = _FittedRuns(row, self._cost.limit, microbatches)
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
        notes += row_notes(self._graph) if len(plan.stages) > 1 else ()
        return Search(replace(plan, notes=notes))

    def _plan(self, cuts: tuple[int, ...]) -> Plan:
        stages = []
        for at, stage in enumerate(row_stages(self._graph, cuts)):
            run = self._fitted.run(cuts[at], cuts[at + 1], len(cuts) - 1 - at)
            names = dict(zip(self._graph.order[cuts[at] : cuts[at + 1]], (way.name for way in run.ways), strict=True))
            stages.append(replace(stage, ways=tuple(names[number] for number in stage.layers)))
        return Plan(DawnPiperCost.name, tuple(stages), self._cost.rate(tuple(stages)))

    # --- as published -------------------------------------------------------------------------------------------------

    def halved(self) -> Plan | None:
        """Return the plan of the published search; None if none that it tries fits."""
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
        left_held, right_held = (self._always + min(flight, self._m) * self._each for flight in flights)
        both = shares(self._compute, self._compute), shares(left_held, right_held)
        begin, end = sorted(int(np.abs(one - other).argmin()) for one, other in both)
        least = np.maximum(*shares(self._fitted.seconds, self._fitted.seconds))[begin : end + 1]
        return [(int(cuts[begin + at]), float(least[at])) for at in np.argsort(least, kind="stable")]

    # --- the best -----------------------------------------------------------------------------------------------------

    def fastest(self, known: Plan | None) -> Plan | None:
        """Return the fastest plan of all, or the known one if none is faster; None if none fits."""
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
