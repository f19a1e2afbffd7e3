"""The best plan by 2BW's closed form: stages of any size, recompute for each, all with the same number of replicas.

For each depth d and width w, D[s, j] is the time of the slowest of s stages for the layers of the prefix j. A stage
runs without recompute if it fits so, with d microbatches in flight, and with recompute otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.plan.planners.two_bw import Sized, bounded, plan_as_two_bw, single_device_ways, widths
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.layer_ideals import PrefixFamily, all_prefixes, ordered_prefixes
from penstock.plan.stages.planned import Plan, PlannedStage, Search, Skipped
from penstock.plan.stages.two_bw_cost import TwoBwCost, bandwidths

Floats = npt.NDArray[np.float64]

_MOST_PREFIXES = 300  # of a graph whose every cut is looked at


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
        cost, program = TwoBwCost(sized.graph, devices, sized.microbatches), _StagesProgram(sized, devices)
        for depth, width in program.classes():
            bound = program.total / (depth * width) / sized.samples
            if best is not None and bound >= best.seconds_per_sample:
                skipped.append(bounded(sized, depth, width, bound, best.seconds_per_sample))
                continue
            stages = program.solve(depth, width)
            if stages is None:
                continue
            rating = cost.rate(stages)
            if rating.seconds / sized.samples < (math.inf if best is None else best.seconds_per_sample):
                best = Plan("default", stages, rating, program.notes, sized.samples)
    return Search(best, tuple(skipped), "" if best else equal.why)


class _StagesProgram:
    """The dynamic program for one microbatch size."""

    def __init__(self, sized: Sized, devices: Devices) -> None:
        self._sized, self._devices = sized, devices
        graph = sized.graph
        sets = all_prefixes(graph, _MOST_PREFIXES)
        self.notes = () if sets else ("cuts are along one topological order",)
        self._family = PrefixFamily(sets or ordered_prefixes(graph), len(graph.layers))
        ways = {recompute: single_device_ways(graph, recompute) for recompute in (False, True)}
        self._ways = {recompute: found for recompute, found in ways.items() if found is not None}
        members = self._family.members.astype(np.float64)
        self._sums = {
            recompute: {
                key: members @ np.array([getattr(way, key) for way in found])
                for key in ("seconds", "parameters", "memory", "memory_per_microbatch")
            }
            for recompute, found in self._ways.items()
        }
        self.total = sum(min(way.seconds for way in layer.ways if way.tensor == 1) for layer in graph.layers)
        self._edges = self._edge_bytes(members)
        self._contained = np.zeros((len(self._family), len(self._family)), dtype=bool)
        for after in range(len(self._family)):
            self._contained[self._family.below(after), after] = True

    def _edge_bytes(self, members: Floats) -> Floats:
        """Return the bytes of the edges between each stage, by its two prefixes, and all others."""
        edges = self._sized.graph.edges
        sizes = np.array([edge.bytes for edge in edges])
        source, target = (
            members[:, [edge.source for edge in edges]],
            members[:, [edge.target for edge in edges]],
        )
        leaving = (source * (1 - target)) @ sizes  # of each prefix
        passing = (source * sizes) @ (1 - target).T  # from a prefix to what is outside of another
        found: Floats = leaving[:, None] + leaving[None, :] - 2 * passing
        return found

    def classes(self) -> Iterator[tuple[int, int]]:
        """Return the depths and widths."""
        most = self._sized.microbatches
        for depth in range(1, min(self._devices.count, len(self._sized.graph.layers), most) + 1):
            for width in widths(self._devices.count // depth, depth, most):
                yield depth, width

    def _times(self, depth: int, width: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the time of each stage by its two prefixes, and whether it recomputes."""
        across, along = bandwidths(self._devices, width, depth)
        links = 2 * self._edges / along
        limit = math.inf if self._devices.memory is None else self._devices.memory * TOLERANCE
        best, again = np.full(self._contained.shape, np.inf), np.zeros(self._contained.shape, dtype=bool)
        for recompute, sums in self._sums.items():
            compute, parameters, memory, each = (
                sums[key][None, :] - sums[key][:, None]
                for key in ("seconds", "parameters", "memory", "memory_per_microbatch")
            )
            traffic = 2 * (width - 1) / width * parameters / across / self._sized.microbatches
            times = np.maximum((compute + links) / width, traffic)
            times = np.where(self._contained & (memory + depth * each <= limit), times, np.inf)
            again |= times < best if recompute else False
            best = np.minimum(best, times)
        return best, again

    def solve(self, depth: int, width: int) -> tuple[PlannedStage, ...] | None:
        """Return the best stages of one depth and width; None if none fit."""
        times, again = self._times(depth, width)
        reached = np.full(len(self._family), np.inf)
        reached[0] = 0.0
        cuts = []
        for _ in range(depth):
            through = np.maximum(reached[:, None], times)
            cuts.append(through.argmin(axis=0))
            reached = through.min(axis=0)
        if not math.isfinite(reached[-1]):
            return None
        found, after = list[PlannedStage](), len(self._family) - 1
        for from_ in reversed(cuts):
            before = int(from_[after])
            layers = self._family.stage(before, after)
            ways = self._ways[bool(again[before, after])]
            found.append(PlannedStage(layers, width, 1, tuple(ways[number].name for number in layers)))
            after = before
        return tuple(reversed(found))
