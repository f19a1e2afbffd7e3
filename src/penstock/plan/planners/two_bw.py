"""PipeDream-2BW's planner (Narayanan et al., ICML 2021): depth, width, microbatch size, recompute, with equal stages.

The closed form (App. A.1): depth d, width w, microbatches of b samples, N microbatches per batch, so m = N / w for each
pipeline. A microbatch takes max over stages of max(compute + links, sums / m): links are the stage's edges to others,
twice, over the bandwidth between stages, and are not overlapped; sums are the ring's 2 (w - 1) / w P bytes over the
bandwidth between replicas, and are. Memory: two versions of the weights, and the activations of d microbatches, or with
recompute their inputs and the activations of one. Of links up to two speeds count, as published: plans that are
simulated know both orders of ranks, and all levels (`penstock.plan.cluster.rank_links`).

As published (sec. 4 and algorithm 1): for every width and depth, the configurations that fit are rated, and the fastest
is kept; stages are equal, and recompute is everywhere or nowhere. Here a class of configurations is skipped when all
compute, evenly divided, is no faster than the best so far. `plan_for_two_bw_cost` searches the same widths and depths
with the best stages instead of equal ones, of which each recomputes if it does not fit otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from penstock.plan.planners.piper import PiperCost
from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, bandwidths, held, homes_of
from penstock.plan.stages.layer_row import CutProgram, Floats, between
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, Skipped, StageRating
from penstock.plan.stages.prefixes import PrefixFamily, all_prefixes, ordered_prefixes

Division = tuple[tuple[int, ...], ...]

_MOST_PREFIXES = 300  # of a graph whose every cut is looked at


class TwoBwCost(GraphCost):
    """Rates plans whose stages all have the same number of replicas."""

    name = "2bw-paper"

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        width, depth = stages[0].replicas, len(stages)
        if any((stage.replicas, stage.tensor, stage.inner) != (width, 1, ()) for stage in stages):
            return self.refused("its stages are not replicated alike on single devices")
        faults = []
        if self.microbatches % width or self.microbatches // width < depth:
            faults.append(f"{self.microbatches} microbatches are not m >= {depth} for each of {width} pipelines")
        homes = homes_of(stages)
        found = [self._stage(stage, homes, width, depth) for stage in stages]
        return self.rating(found, width * depth, lambda: max(rating.seconds for rating in found), faults)

    def _stage(self, stage: PlannedStage, homes: Mapping[int, int], width: int, depth: int) -> StageRating:
        own, ways = homes[stage.layers[0]], self.ways(stage)
        edges = sum(
            edge.bytes
            for number in stage.layers
            for edge, end in (
                *((edge, edge.source) for edge in self.graph.inputs[number]),
                *((edge, edge.target) for edge in self.graph.readers[number]),
            )
            if homes[end] != own
        )
        across, along = bandwidths(self.devices, width, depth)
        parameters = sum(way.parameters for way in ways)
        parts = {
            "compute": sum(way.seconds for way in ways) / width,
            "links": 2 * edges / along / width,
            "gradient sums": 2 * (width - 1) / width * parameters / across / self.microbatches,
        }
        return StageRating(max(parts["compute"] + parts["links"], parts["gradient sums"]), parts, held(ways, depth))


@dataclass(frozen=True)
class Sized:
    """A graph at a microbatch size, with the microbatches of a batch of that size.

    Attributes:
        graph: the layers.
        samples: of a microbatch; 1 if the profile does not say.
        microbatches: per batch.
    """

    graph: LayerGraph
    samples: int
    microbatches: int

    @cached_property
    def least_seconds(self) -> float:
        """Those of all layers, each in its fastest way on one device."""
        return sum(min(way.seconds for way in layer.ways if way.tensor == 1) for layer in self.graph.layers)

    def least_per_sample(self, depth: int, width: int) -> float:
        """Return the seconds per sample that all compute takes, evenly divided."""
        return self.least_seconds / (depth * width) / self.samples

    def skipped(self, depth: int, width: int, best: float) -> Skipped:
        """Return a depth and width whose compute alone takes as long as the best plan so far, in seconds per sample."""
        return Skipped(
            f"depth {depth}, width {width}" + (f", microbatch {self.samples}" if self.samples > 1 else ""),
            f"compute alone takes {self.least_per_sample(depth, width):.4g} s per sample, "
            f"the best plan so far {best:.4g}",
        )

    def depths(self, devices: Devices) -> range:
        """Return the numbers of stages that there may be."""
        return range(1, min(devices.count, len(self.graph.layers), self.microbatches) + 1)


def widths(most: int, depth: int, microbatches: int) -> Iterator[int]:
    """Return the widths that divide the microbatches and leave each pipeline as many as it is deep."""
    return (w for w in range(1, most + 1) if microbatches % w == 0 and microbatches // w >= depth)


def single_device_ways(graph: LayerGraph, recompute: bool) -> list[Way] | None:
    """Return how each layer runs with recompute everywhere or nowhere; None if some layer needs several devices.

    A way with recompute is one whose name says so; a layer without one has nothing to recompute.
    """
    found = []
    for layer in graph.layers:
        ways = [way for way in layer.ways if way.tensor == 1]
        if not ways:
            return None
        again = [way for way in ways if "recomp" in way.name]
        plain = [way for way in ways if "recomp" not in way.name] or ways
        found.append((again or plain)[0] if recompute else plain[0])
    return found


def _stage(layers: tuple[int, ...], width: int, ways: Sequence[Way]) -> PlannedStage:
    return PlannedStage(layers, width, 1, tuple(ways[number].name for number in layers))


# --- as published -----------------------------------------------------------------------------------------------------


def plan_as_two_bw(sizes: Mapping[int, Sized], devices: Devices, cost: str = TwoBwCost.name) -> Search:
    """Return the best configuration with equal stages.

    Args:
        sizes: the graph at each microbatch size, by samples.
        devices: not all need be used.
        cost: "piper"; any other is its own closed form.
    """
    best, least, skipped, closest = None, math.inf, list[Skipped](), ""
    for sized in sizes.values():
        rater = (PiperCost if cost == PiperCost.name else TwoBwCost)(sized.graph, devices, sized.microbatches)
        ways = [single_device_ways(sized.graph, recompute) for recompute in (False, True)]
        if ways[0] is None:
            return Search(None, why="a layer cannot run on a single device, as this planner needs")
        for depth in sized.depths(devices):
            divisions = equal_divisions(sized.graph, depth)
            for width in widths(devices.count // depth, depth, sized.microbatches) if divisions else ():
                if sized.least_per_sample(depth, width) >= least:
                    skipped.append(sized.skipped(depth, width, least))
                    continue
                for division, chosen in product(divisions, filter(None, ways)):
                    stages = tuple(_stage(layers, width, chosen) for layers in division)
                    rating = rater.rate(stages)
                    closest = closest or rating.fault
                    if rating.seconds / sized.samples < least:
                        best = Plan(TwoBwCost.name, stages, rating, samples=sized.samples)
                        least = best.seconds_per_sample
    if best is None:
        fault = f"no configuration with equal stages fits; the first one: {closest or 'no division exists'}"
        return Search(None, tuple(skipped), f"no plan fits: {fault}")
    return Search(best, tuple(skipped))


def equal_divisions(graph: LayerGraph, stages: int) -> list[Division]:
    """Return the ways to divide a graph into stages with equal numbers of blocks, or numbers that differ by one.

    Blocks are the layers of the kind that takes most time, of those with two layers or more, and what stands before and
    after them belongs to the first and the last stage, or to a stage of its own; or all layers are blocks, along the
    topological order nearest to the file, or the one that goes deep first. Later stages are the larger ones. A division
    in which a stage reads a later one is left out.
    """
    by_layers = [tuple(_shares(order, stages)) for order in (graph.order, _depth_first(graph)) if stages <= len(order)]
    found = dict.fromkeys([*_by_blocks(graph, stages), *by_layers])
    return [division for division in found if all(division) and _is_pipeline(graph, division)]


def _shares(blocks: tuple[int, ...], stages: int) -> list[tuple[int, ...]]:
    """Divide blocks; the last stages have one more if need be."""
    least, more = divmod(len(blocks), stages)
    found, at = [], 0
    for stage in range(stages):
        count = least + (stage >= stages - more)
        found.append(blocks[at : at + count])
        at += count
    return found


def _depth_first(graph: LayerGraph) -> tuple[int, ...]:
    """Return the topological order in which the layer that has become ready last comes next."""
    left = [len(edges) for edges in graph.inputs]
    ready = [number for number, count in enumerate(left) if not count]
    found = []
    while ready:
        number = ready.pop()
        found.append(number)
        for edge in graph.readers[number]:
            left[edge.target] -= 1
            if not left[edge.target]:
                ready.append(edge.target)
    return tuple(found)


def _by_blocks(graph: LayerGraph, stages: int) -> Iterator[Division]:
    """Divide the layers of one kind, and give the others to the ends."""
    counts = Counter(layer.kind for layer in graph.layers if layer.kind)
    times = Counter[str]()
    for layer in graph.layers:
        times[layer.kind] += layer.seconds  # type: ignore[assignment]
    kinds = [kind for kind, count in counts.items() if count > 1]
    if not kinds:
        return
    kind = max(kinds, key=lambda each: times[each])
    blocks = tuple(number for number in graph.order if graph.layers[number].kind == kind)
    leading = graph.ancestors(blocks)
    first = tuple(n for n in graph.order if n in leading and n not in blocks)
    last = tuple(n for n in graph.order if n not in leading and n not in blocks)
    if stages <= len(blocks):
        shares = _shares(blocks, stages)
        shares[0] = (*first, *shares[0])
        shares[-1] = (*shares[-1], *last)
        yield tuple(shares)
    if first and last and 3 <= stages <= len(blocks) + 2:
        yield (first, *_shares(blocks, stages - 2), last)


def _is_pipeline(graph: LayerGraph, division: Division) -> bool:
    """Return whether no stage reads a later one."""
    homes = {number: at for at, layers in enumerate(division) for number in layers}
    return all(homes[edge.source] <= homes[edge.target] for edge in graph.edges)


# --- the best ---------------------------------------------------------------------------------------------------------


def plan_for_two_bw_cost(sizes: Mapping[int, Sized], devices: Devices) -> Search:
    """Return the least cost by the closed form; never above `plan_as_two_bw`, whose answer it begins with.

    Args:
        sizes: the graph at each microbatch size, by samples.
        devices: not all need be used.
    """
    equal = plan_as_two_bw(sizes, devices)
    if equal.plan is None and any(single_device_ways(sized.graph, False) is None for sized in sizes.values()):
        return equal
    best = equal.plan and replace(equal.plan, planner="default")
    skipped = list[Skipped]()
    for sized in sizes.values():
        search = _UnequalStages(sized, devices)
        for depth in sized.depths(devices):
            for width in widths(devices.count // depth, depth, sized.microbatches):
                least = math.inf if best is None else best.seconds_per_sample
                if sized.least_per_sample(depth, width) >= least:
                    skipped.append(sized.skipped(depth, width, least))
                    continue
                plan = search.plan(depth, width)
                if plan is not None and plan.seconds_per_sample < least:
                    best = plan
    return Search(best, tuple(skipped), "" if best else equal.why)


class _UnequalStages:
    """The best stages of any size for one microbatch size."""

    def __init__(self, sized: Sized, devices: Devices) -> None:
        graph = sized.graph
        self._cost, self._samples = TwoBwCost(graph, devices, sized.microbatches), sized.samples
        sets = all_prefixes(graph, _MOST_PREFIXES)
        self._notes = () if sets else ("cuts are along one topological order",)
        self._family = PrefixFamily(sets or ordered_prefixes(graph), len(graph.layers))
        ways = ((recompute, single_device_ways(graph, recompute)) for recompute in (False, True))
        self._ways = {recompute: found for recompute, found in ways if found is not None}
        self._contained = np.zeros((len(self._family), len(self._family)), dtype=bool)
        for after in range(len(self._family)):
            self._contained[self._family.below(after), after] = True
        members = self._family.members.astype(np.float64)
        self._sums = {
            recompute: {
                key: between(members @ np.array([getattr(way, key) for way in found]))
                for key in ("seconds", "parameters", "memory", "memory_per_microbatch")
            }
            for recompute, found in self._ways.items()
        }
        self._edges = self._edge_bytes(members)

    def _edge_bytes(self, members: Floats) -> Floats:
        """Return the bytes of the edges between each stage, by its two prefixes, and all others."""
        edges = self._cost.graph.edges
        sizes = np.array([edge.bytes for edge in edges])
        source, target = members[:, [edge.source for edge in edges]], members[:, [edge.target for edge in edges]]
        leaving = (source * (1 - target)) @ sizes  # of each prefix
        passing = (source * sizes) @ (1 - target).T  # from a prefix to what is outside of another
        found: Floats = leaving[:, None] + leaving[None, :] - 2 * passing
        return found

    def plan(self, depth: int, width: int) -> Plan | None:
        times, again = self._times(depth, width)
        program = CutProgram(len(self._family))
        for _ in range(depth):
            program.add_stage_anyhow(times)
        if not math.isfinite(program.least[()][-1]):
            return None
        cuts, stages = program.trace(())[0], list[PlannedStage]()
        for before, after in pairwise(cuts):
            ways = self._ways[bool(again[before, after])]
            stages.append(_stage(self._family.stage(before, after), width, ways))
        return Plan("default", tuple(stages), self._cost.rate(tuple(stages)), self._notes, self._samples)

    def _times(self, depth: int, width: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the time of each stage by its two prefixes, and whether it recomputes."""
        across, along = bandwidths(self._cost.devices, width, depth)
        links = 2 * self._edges / along
        best, again = np.full(self._contained.shape, np.inf), np.zeros(self._contained.shape, dtype=bool)
        for recompute, sums in self._sums.items():
            traffic = 2 * (width - 1) / width * sums["parameters"] / across / self._cost.microbatches
            fits = sums["memory"] + depth * sums["memory_per_microbatch"] <= self._cost.limit
            times = np.maximum((sums["seconds"] + links) / width, traffic)
            times = np.where(self._contained & fits, times, np.inf)
            again |= times < best if recompute else False
            best = np.minimum(best, times)
        return best, again
