"""Mist's planner (Zhu et al., EuroSys 2025, arXiv 2503.19050), for two of its memory optimizations.

Stages, which layers of each are recomputed, and whether optimizer states are sharded are chosen at once.

All of d stages have w replicas, so each pipeline has m = N / w microbatches of a batch. Stage i takes T_i per
microbatch: its layers, some of which may be recomputed, and its messages, which are not overlapped. D_i is what its
last microbatch takes besides: the ring that adds up gradients, and the update. A batch takes

    (m - 1) max T_i  +  sum T_i  +  max over i of (D_i - sum of T_j before i).

A device of stage i holds weights and gradients, the optimizer's state, and min(d - i, m) microbatches. If the state is
sharded over the replicas it takes 1 / w of that and of the update, and weights are gathered after it, which takes as
long as half of a ring.

For each depth and width, every run of consecutive blocks that may be a stage gets its Pareto front of (T, D): without
sharded optimizer states, or with, the fastest choice of recomputed layers that fits.
A mixed-integer program, solved by HiGHS, then chooses the cut and a point of each front. Where a model has many blocks,
stages have at most a few more or fewer than the average, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import CapabilityError, ConfigError
from penstock.plan.planners.two_bw import widths
from penstock.plan.profile.layer_graph import GraphLayer, LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, bandwidths, held, homes_of, recompute_of
from penstock.plan.stages.knapsack import best_ways
from penstock.plan.stages.layer_row import is_in_order, single_device_options
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, Skipped, StageRating

ADAM = 2.0  # copies of the parameters that an optimizer holds, where the profile does not say
MOST_CHOICES = 40_000
_SECONDS = 60.0  # of the mixed-integer program
_SPREAD = 2  # blocks of a stage more or fewer than the average, where there are many
_EVERY = 12  # blocks of a model of which every cut is tried
_MIXED = (
    "stages that recompute a part of their layers, or of which some shard, are computed here; in a run a stage "
    "recomputes all of its blocks or none, and all stages shard alike"
)


# --- the cost ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnobbedStage:
    """What a stage takes with its memory optimizations.

    Attributes:
        steady: T, seconds per microbatch.
        extra: D, seconds per batch.
        memory: bytes of a device.
    """

    steady: float
    extra: float
    memory: float


def batch_seconds(stages: Sequence[KnobbedStage], microbatches: int) -> float:
    steady = [stage.steady for stage in stages]
    ends = [stage.extra - sum(steady[:at]) for at, stage in enumerate(stages)]
    return (microbatches - 1) * max(steady) + sum(steady) + max(ends)


def state_bytes(layers: Sequence[GraphLayer]) -> float:
    """Return the bytes of what the optimizer remembers of some layers."""
    return sum(ADAM * layer.parameters if layer.optimizer is None else layer.optimizer for layer in layers)


class MistCost(GraphCost):
    """Rates plans whose stages all have the same number of replicas. Of links up to two speeds count."""

    name = "mist"

    def stage(self, ways: dict[int, Way], edges: float, place: tuple[int, int, int], sharded: bool) -> KnobbedStage:
        """Return what a stage takes.

        Args:
            ways: of its layers, by their numbers.
            edges: bytes of the edges between it and other stages.
            place: its number, the depth and the width.
            sharded: whether optimizer states are.
        """
        at, depth, width = place
        across, along = bandwidths(self.devices, width, depth)
        layers = [self.graph.layers[number] for number in ways]
        parameters = sum(layer.parameters for layer in layers)
        state = state_bytes(layers)
        part = 1 / width if sharded else 1.0
        ring = 2 * (width - 1) / width * parameters / across
        extra = ring * (1.5 if sharded else 1.0) + part * sum(layer.step for layer in layers)
        extra += self.devices.update * any(layer.has_update for layer in layers)
        flight = min(depth - at, self.microbatches // width)
        steady = sum(way.seconds for way in ways.values()) + 2 * edges / along
        return KnobbedStage(steady, extra, held(ways.values(), flight) + part * state)

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        width, depth = stages[0].replicas, len(stages)
        if any((stage.replicas, stage.tensor, stage.inner) != (width, 1, ()) for stage in stages):
            return self.refused("its stages are not replicated alike on single devices")
        faults, found, ratings = list[str](), list[KnobbedStage](), list[StageRating]()
        if self.microbatches % width:
            faults.append(f"{self.microbatches} microbatches cannot be divided over {width} pipelines")
        homes = homes_of(stages)
        for at, stage in enumerate(stages):
            ways = dict(zip(stage.layers, self.ways(stage), strict=True))
            edges = sum(e.bytes for e in self.graph.edges if (homes[e.source] == at) != (homes[e.target] == at))
            knobbed = self.stage(ways, edges, (at, depth, width), stage.sharded)
            found.append(knobbed)
            links = 2 * edges / bandwidths(self.devices, width, depth)[1]
            parts = {
                "compute": (knobbed.steady - links) / width,
                "links": links / width,
                "gradient sums": knobbed.extra / self.microbatches,
            }
            ratings.append(StageRating(knobbed.steady / width + parts["gradient sums"], parts, knobbed.memory))
        m = self.microbatches
        return self.rating(ratings, width * depth, lambda: batch_seconds(found, m // width) / m, faults)


# --- the program ------------------------------------------------------------------------------------------------------


class StageChoice(NamedTuple):
    """One option of a stage.

    Attributes:
        stage: its number.
        first, last: its blocks, `last` not included.
        steady: T, seconds per microbatch.
        extra: D, seconds per batch.
        ways: names of the ways of its blocks.
        sharded: whether its optimizer states are.
    """

    stage: int
    first: int
    last: int
    steady: float
    extra: float
    ways: tuple[str, ...] = ()
    sharded: bool = False


def least_batch(choices: Sequence[StageChoice], blocks: int, depth: int, microbatches: int) -> list[StageChoice] | None:
    """Return the choices that make the fastest batch, one for each stage; None if no path of them covers all blocks.

    Binary x for each choice; the blocks of a stage begin where those of the stage before end. Minimized is
    (m - 1) t + sum of T x + e with t >= T of each stage and e >= D_i - sum of T before i.

    Args:
        choices: of all stages.
        blocks: in the model.
        depth: stages.
        microbatches: m, of a pipeline.

    Raises:
        CapabilityError: scipy is not installed.
        ConfigError: there are too many choices, or no answer was found in a minute.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
        from scipy.sparse import coo_array  # type: ignore[import-untyped]
    except ImportError:
        raise CapabilityError("planner 'mist' needs scipy; install penstock with the extra 'exact'") from None
    count = len(choices)
    if not count:
        return None
    if count > MOST_CHOICES:
        raise ConfigError(f"planner 'mist' has {count:,} choices of stages, more than {MOST_CHOICES:,}; merge layers")
    stage, first, last, steady, extra = (np.array(each) for each in list(zip(*choices, strict=True))[:5])
    # a path from the begin of the first stage to the end of the last one: what comes to a place goes on from there
    begins, ends = stage * (blocks + 1) + first, (stage + 1) * (blocks + 1) + last
    entries = np.repeat([1.0, -1.0], count), (np.concatenate((ends, begins)), np.tile(np.arange(count), 2))
    path = coo_array(entries, shape=((depth + 1) * (blocks + 1), count + 2)).tocsr()
    balance = np.zeros(path.shape[0])
    balance[0], balance[-1] = -1.0, 1.0
    # t and e are the last two columns
    at, times = np.arange(depth)[:, None], np.zeros((2 * depth, count + 2))
    times[0::2, :count], times[0::2, count] = np.where(stage == at, -steady, 0.0), 1.0
    times[1::2, :count] = np.where(stage < at, steady, 0.0) - np.where(stage == at, extra, 0.0)
    times[1::2, count + 1] = 1.0
    found = milp(
        np.array([*steady, microbatches - 1.0, 1.0]),
        integrality=np.array([1] * count + [0, 0]),
        bounds=Bounds([0.0] * (count + 1) + [-np.inf], [1.0] * count + [np.inf, np.inf]),
        constraints=[LinearConstraint(path, balance, balance), LinearConstraint(times, 0.0)],
        options={"time_limit": _SECONDS, "mip_rel_gap": 1e-9},
    )
    if found.status == 2:
        return None
    if found.x is None or found.status != 0:
        raise ConfigError(f"planner 'mist' found no answer in {_SECONDS:g} s ({found.message}); merge layers")
    return [choices[int(np.where(stage == each, found.x[:count], -1.0).argmax())] for each in range(depth)]


# --- the search -------------------------------------------------------------------------------------------------------


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


class _MistSearch:
    """Plans of a chain of blocks.

    Attributes:
        total: seconds of all layers, each in its fastest way.
    """

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        if not is_in_order(graph):
            raise ConfigError(
                "planner 'mist' cuts consecutive layers: order the profile so that each reads earlier ones"
            )
        self._graph, self._devices, self._m = graph, devices, microbatches
        self._cost = MistCost(graph, devices, microbatches)
        self._ways = single_device_options(graph, "planner 'mist'")
        self.total = sum(min(way.seconds for way in ways) for ways in self._ways)
        self._heuristic = False

    def plan(self, depth: int, width: int) -> Plan | None:
        choices = list(self._choices(depth, width))
        chosen = least_batch(choices, len(self._graph.layers), depth, self._m // width)
        if chosen is None:
            return None
        stages = tuple(
            PlannedStage(tuple(range(each.first, each.last)), width, 1, each.ways, sharded=each.sharded)
            for each in chosen
        )
        mixed = any(recompute_of(self._graph, stage) is None for stage in stages)
        notes: tuple[str, ...] = (_MIXED,) if mixed or len({stage.sharded for stage in stages}) > 1 else ()
        notes += ("which layers are recomputed was found by a heuristic",) if self._heuristic else ()
        return Plan(MistCost.name, stages, self._cost.rate(stages), notes)

    def _choices(self, depth: int, width: int) -> Iterator[StageChoice]:
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

    def _front(self, at: int, run: tuple[int, int], edges: float, depth: int, width: int) -> list[StageChoice]:
        """Return the choices of a stage of which no other one is as good in T and in D."""
        found = list[StageChoice]()
        for sharded in (False, True) if width > 1 else (False,):
            chosen = self._fastest(at, run, (depth, width), sharded)
            if chosen is None:
                continue
            ways, names = dict(zip(range(*run), chosen, strict=True)), tuple(way.name for way in chosen)
            stage = self._cost.stage(ways, edges, (at, depth, width), sharded)
            if not any(each.steady <= stage.steady and each.extra <= stage.extra for each in found):
                found = [each for each in found if each.steady < stage.steady or each.extra < stage.extra]
                found.append(StageChoice(at, *run, stage.steady, stage.extra, names, sharded))
        return found

    def _fastest(self, at: int, run: tuple[int, int], size: tuple[int, int], sharded: bool) -> tuple[Way, ...] | None:
        """Return the fastest ways of the layers of a stage with which it fits; None if there are none."""
        depth, width = size
        flight = min(depth - at, self._m // width)
        options = self._ways[run[0] : run[1]]
        seconds = [np.array([way.seconds for way in ways]) for ways in options]
        memory = [np.array([held([way], flight) for way in ways]) for ways in options]
        left = self._cost.limit - state_bytes(self._graph.layers[run[0] : run[1]]) * (1 / width if sharded else 1.0)
        found, exact = best_ways(seconds, memory, left)
        self._heuristic |= not exact
        return None if found is None else tuple(ways[n] for ways, n in zip(options, found.ways, strict=True))
