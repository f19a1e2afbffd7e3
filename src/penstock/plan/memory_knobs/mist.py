"""Mist's planner: stages, which layers of each are recomputed, and whether optimizer states are sharded, at once.

For each depth and width, every run of consecutive blocks that may be a stage gets its Pareto front of (T, D): without
sharded optimizer states, or with, the fastest choice of recomputed layers that fits (`penstock.plan.stages.knapsack`).
A mixed-integer program then chooses the cut and a point of each front (`cut_program`). Where a model has many blocks,
stages have at most a few more or fewer than the average, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.memory_knobs.cut_program import MOST_CHOICES, StageChoice, least_batch
from penstock.plan.memory_knobs.mist_cost import MistCost, state_bytes
from penstock.plan.planners.published_run import recompute_of
from penstock.plan.planners.two_bw import widths
from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.knapsack import greedy_time, least_time
from penstock.plan.stages.planned import Plan, PlannedStage, Search, Skipped

_SPREAD = 2  # blocks of a stage more or fewer than the average, where there are many
_EVERY = 12  # blocks of a model of which every cut is tried
_MIXED = (
    "stages that recompute a part of their layers, or of which some shard, are computed here; in a run a stage "
    "recomputes all of its blocks or none, and all stages shard alike"
)


def plan_as_mist(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the best plan.

    Raises:
        ConfigError: the layers do not stand in an order in which they run, one cannot run on a single device, or the
            search would be too large.
        CapabilityError: scipy is not installed.
    """
    search = _MistSearch(graph, devices, microbatches)
    best, skipped = None, list[Skipped]()
    for depth in range(1, min(devices.count, len(graph.layers)) + 1):
        for width in widths(devices.count // depth, 1, microbatches):
            bound = search.total / (depth * width)
            if best is not None and bound >= best.rating.seconds:
                said = (
                    f"compute alone takes {bound:.4g} s per microbatch, the best plan so far {best.rating.seconds:.4g}"
                )
                skipped.append(Skipped(f"depth {depth}, width {width}", said))
                continue
            plan = search.plan(depth, width)
            if plan is not None and (best is None or plan.rating.seconds < best.rating.seconds):
                best = plan
    why = "" if best else "no plan fits: no division into stages does, with all layers recomputed and states sharded"
    return Search(best, tuple(skipped), why)


@dataclass(frozen=True)
class _Point:
    """A point of a front: the choice, and what it is made of."""

    choice: StageChoice
    ways: tuple[Way, ...]
    sharded: bool


class _MistSearch:
    """Plans of a chain of blocks.

    Attributes:
        total: seconds of all layers, each in its fastest way.
    """

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        if graph.order != tuple(range(len(graph.layers))):
            raise ConfigError(
                "planner 'mist' cuts consecutive layers: order the profile so that each reads earlier ones"
            )
        self._graph, self._devices, self._m = graph, devices, microbatches
        self._cost = MistCost(graph, devices, microbatches)
        self._ways = [tuple(way for way in layer.ways if way.tensor == 1) for layer in graph.layers]
        alone = next((layer.name for layer, ways in zip(graph.layers, self._ways, strict=True) if not ways), None)
        if alone is not None:
            raise ConfigError(f"planner 'mist' puts layers on single devices; layer {alone!r} needs several")
        self.total = sum(min(way.seconds for way in ways) for ways in self._ways)
        self._heuristic = False

    def plan(self, depth: int, width: int) -> Plan | None:
        """Return the best plan of a depth and width; None if none fits."""
        points = list(self._points(depth, width))
        blocks = len(self._graph.layers)
        chosen = least_batch([point.choice for point in points], blocks, depth, self._m // width) if points else None
        if chosen is None:
            return None
        picked = [points[number] for number in chosen]
        stages = tuple(
            PlannedStage(
                tuple(range(point.choice.first, point.choice.last)),
                width,
                1,
                tuple(way.name for way in point.ways),
                sharded=point.sharded,
            )
            for point in picked
        )
        mixed = any(recompute_of(self._graph, stage) is None for stage in stages)
        notes: tuple[str, ...] = (_MIXED,) if mixed or len({stage.sharded for stage in stages}) > 1 else ()
        notes += ("which layers are recomputed was found by a heuristic",) if self._heuristic else ()
        return Plan(MistCost.name, stages, self._cost.rate(stages), notes)

    def _points(self, depth: int, width: int) -> Iterator[_Point]:
        """Yield the front of every stage."""
        blocks = len(self._graph.layers)
        for first, last in self._runs(blocks, depth):
            edges = sum(
                edge.bytes
                for edge in self._graph.edges
                if (first <= edge.source < last) != (first <= edge.target < last)
            )
            for at in range(depth):
                if first < at or blocks - last < depth - 1 - at or (first == 0) != (at == 0):
                    continue
                if (last == blocks) != (at == depth - 1):
                    continue
                yield from self._front(at, (first, last), edges, depth, width)

    def _runs(self, blocks: int, depth: int) -> Iterator[tuple[int, int]]:
        """Yield runs of blocks that may be a stage."""
        least, most = 1, blocks - depth + 1
        if blocks > _EVERY:
            mean = blocks / depth
            least, most = max(1, math.floor(mean) - _SPREAD), min(most, math.ceil(mean) + _SPREAD)
        if (most - least + 1) * blocks * depth * 2 > 4 * MOST_CHOICES:
            raise ConfigError(f"planner 'mist' has too many stages of {blocks} layers to try; merge layers")
        return ((first, first + n) for n in range(least, most + 1) for first in range(blocks - n + 1))

    def _front(self, at: int, run: tuple[int, int], edges: float, depth: int, width: int) -> Iterator[_Point]:
        """Yield the points of a stage of which no other one is as good in T and in D."""
        first, last = run
        limit = math.inf if self._devices.memory is None else self._devices.memory * TOLERANCE
        found = list[_Point]()
        for sharded in (False, True) if width > 1 else (False,):
            chosen = self._fastest(at, run, (depth, width), sharded, limit)
            if chosen is None:
                continue
            ways = dict(zip(range(first, last), chosen, strict=True))
            stage = self._cost.stage(ways, edges, (at, depth, width), sharded)
            if found and found[0].choice.steady <= stage.steady and found[0].choice.extra <= stage.extra:
                continue
            found.append(_Point(StageChoice(at, first, last, stage.steady, stage.extra), chosen, sharded))
        if len(found) == 2 and all(
            getattr(found[1].choice, key) <= getattr(found[0].choice, key) for key in ("steady", "extra")
        ):
            found.pop(0)
        yield from found

    def _fastest(
        self, at: int, run: tuple[int, int], size: tuple[int, int], sharded: bool, limit: float
    ) -> tuple[Way, ...] | None:
        """Return the fastest ways of the layers of a stage with which it fits; None if there are none."""
        depth, width = size
        flight = min(depth - at, self._m // width)
        options = self._ways[run[0] : run[1]]
        seconds = [np.array([way.seconds for way in ways]) for ways in options]
        memory = [np.array([way.memory + flight * way.memory_per_microbatch for way in ways]) for ways in options]
        left = limit - state_bytes(self._graph.layers[run[0] : run[1]]) * (1 / width if sharded else 1.0)
        try:
            found = least_time(seconds, memory, left)
        except OverflowError:
            found = greedy_time(seconds, memory, left)
            self._heuristic = True
        return None if found is None else tuple(ways[n] for ways, n in zip(options, found.ways, strict=True))
