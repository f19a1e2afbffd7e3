"""PipeDream's planner: a dynamic program over prefixes, level by level of the devices, with replicated stages.

T[p, j, m] is the time of the best pipeline for the layers between the prefixes p and j on m units of a level. It is
one stage with m replicas, or a pipeline between p and k on m - r units and a last stage between k and j with r
replicas. The time that a unit of the next level takes is T with all units (Harlap et al., arXiv 1806.03377; SOSP
2019, sec. 3.1).

The costs are those of the released program (`optimizer/optimizer_graph_hierarchical.py`). A pipeline is as slow as its
slowest stage. A stage with r replicas takes (compute + 4 (r - 1) P / (r B)) / r, for P bytes of parameters and a
bandwidth of B: a sum, with a parameter server's traffic. The paper's recurrence has the larger of the two instead. With
levels of devices, "compute" is the time of the pipeline inside a unit, and the first stage of a pipeline divides its
traffic by the units of the level below, as the program does. Activations cost time only if a compression ratio is
given. With a limit of memory, the layers' outputs and parameters, times ceil((M - used) / r) for M units of the level
of which `used` stand before or in the stage, must fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.byte_sizes import human_bytes
from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerEdge, LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.layer_row import Floats, Number
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating
from penstock.plan.stages.prefixes import PrefixFamily, all_prefixes, bits, fewer_prefixes, frontier_prefixes

Places = npt.NDArray[np.intp]

_MOST_WORK = 40_000_000_000  # comparisons: some minutes
MOST_FRONTIERS = 20_000
_MOST_EXACT = (4_000, 400)  # all prefixes, if there are at most so many: with one level of devices, with several


@dataclass(frozen=True)
class Choices:
    """What the planner may choose.

    Attributes:
        straight: no stage is replicated.
        fewer: units may be left unused.
        compression: of activations; see `PipeDreamCost`.
    """

    straight: bool = False
    fewer: bool = False
    compression: float | None = None


# --- the cost ---------------------------------------------------------------------------------------------------------


def placed_layers(graph: LayerGraph) -> tuple[int, ...]:
    """Return the layers that the planner places: inputs belong to the first stage, unread items of tuples to no one.

    These are sources of the kind "Input.." and, once they are gone, sinks of the kind "__getitem__..".
    """
    inputs = {n for n, layer in enumerate(graph.layers) if layer.kind.startswith("Input") and not graph.inputs[n]}
    unread = {
        n
        for n, layer in enumerate(graph.layers)
        if layer.kind.startswith("__getitem__") and not graph.readers[n] and n not in inputs
    }
    kept = tuple(n for n in range(len(graph.layers)) if n not in inputs | unread)
    return kept or tuple(range(len(graph.layers)))


def restricted(graph: LayerGraph, layers: tuple[int, ...]) -> LayerGraph:
    """Return a graph of some of the layers, with the edges among them."""
    places = {number: place for place, number in enumerate(layers)}
    edges = (
        LayerEdge(places[edge.source], places[edge.target], edge.bytes)
        for edge in graph.edges
        if edge.source in places and edge.target in places
    )
    return replace(graph, layers=tuple(graph.layers[number] for number in layers), edges=tuple(edges))


def boundary_bytes(graph: LayerGraph, prefix: int) -> float:
    """Return the bytes that leave a prefix, as the program counts them.

    These are the outputs of its last layers and of those that, seen from one of the last ones, are also read elsewhere.
    """
    members = bits(prefix)
    last = [n for n in members if not any(prefix >> edge.target & 1 for edge in graph.readers[n])]
    leaving = set(last)
    for end in last:
        before = graph.ancestors([end])
        leaving |= {n for n in before if any(edge.target not in before | {end} for edge in graph.readers[n])}
    return sum(graph.layers[n].output for n in leaving)


def stage_seconds(compute: Number, parameters: Number, replicas: int, bandwidth: float, divided_by: int) -> Number:
    """Return the time of a stage without its transfers."""
    return (compute + 4 * (replicas - 1) * parameters / (bandwidth * replicas) / divided_by) / replicas


@dataclass(frozen=True)
class PipeDreamCost(GraphCost):
    """Rates plans with as many levels of stages as devices have; layers that are not placed cost nothing.

    Attributes:
        compression: the compression ratio of activations; None: they cost no time.
    """

    name = "pipedream"
    compression: float | None = None

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        kept = set(placed_layers(self.graph))
        ratings, faults = self._pipeline(stages, len(self.devices.levels) - 1, 0, kept)
        seconds = math.inf if faults else max(each.seconds for each in ratings)
        return Rating(self.name, seconds, tuple(ratings), faults[0] if faults else "")

    def _pipeline(
        self, stages: tuple[PlannedStage, ...], level: int, before: int, kept: set[int]
    ) -> tuple[list[StageRating], list[str]]:
        """Return what the stages of a pipeline on one level cost, and what does not fit."""
        units, bandwidth = self.devices.levels[level].units, self.devices.levels[level].bandwidth
        below = self.devices.levels[level - 1].units if level else 1
        found, faults, used = list[StageRating](), list[str](), 0
        if (needed := sum(stage.replicas for stage in stages)) > units:
            faults.append(f"it needs {needed} units of a level that has {units}")
        for at, stage in enumerate(stages):
            own = [self.graph.layers[number] for number in stage.layers if number in kept]
            used += stage.replicas
            if level and stage.inner:
                inner, more = self._pipeline(stage.inner, level - 1, before, kept)
                faults += more
                compute = max(each.seconds for each in inner)
            else:
                compute = sum(layer.seconds for layer in own)
            after = before | sum(1 << number for number in stage.layers if number in kept)
            parameters = sum(layer.parameters for layer in own)
            seconds = stage_seconds(compute, parameters, stage.replicas, bandwidth, 1 if at else below)
            alone = compute / stage.replicas
            parts = {"compute": alone, "gradient sums": seconds - alone}
            if self.compression is not None and at:
                parts["links"] = self._transfer(before, after, bandwidth * stage.replicas, kept)
                seconds = max(seconds, parts["links"])
            kept_bytes = parameters + sum(layer.output + layer.frozen for layer in own)
            memory = math.ceil((units - used) / stage.replicas) * kept_bytes
            if self.devices.memory is not None and memory > self.devices.memory:
                faults.append(f"stage {at} stashes {human_bytes(memory, 2)} of {human_bytes(self.devices.memory, 2)}")
            found.append(StageRating(seconds, parts, memory))
            before = after
        return found, faults

    def _transfer(self, before: int, after: int, bandwidth: float, kept: set[int]) -> float:
        """Return the time of the slower one of a stage's transfers: what it reads, and what it hands on."""
        assert self.compression is not None
        whole = tuple(sorted(kept))
        places = {number: place for place, number in enumerate(whole)}
        graph = restricted(self.graph, whole)
        sides = [sum(1 << places[number] for number in bits(side) if number in places) for side in (before, after)]
        if sides[1] == (1 << len(whole)) - 1:
            sides.pop()
        return max(2 * boundary_bytes(graph, side) / bandwidth / self.compression for side in sides)


# --- the search -------------------------------------------------------------------------------------------------------


def plan_as_pipedream(graph: LayerGraph, devices: Devices, choices: Choices | None = None) -> Search:
    """Return the plan of the published program: the same prefixes, the same costs, every unit used.

    Raises:
        ConfigError: the graph has too many prefixes.
    """
    sets = frontier_prefixes(restricted(graph, placed_layers(graph)), MOST_FRONTIERS)
    if sets is None:
        raise ConfigError(
            f"planner pipedream: the graph has more than {MOST_FRONTIERS:,} antichains, too many for its dynamic "
            "program; merge layers of parallel branches, or use the default planner, which then cuts along one order"
        )
    return _search("pipedream", graph, sets, devices, choices or Choices())


def plan_for_pipedream_cost(graph: LayerGraph, devices: Devices, choices: Choices | None = None) -> Search:
    """Return the least cost in a larger space: every prefix of the graph, if they are not too many; units may be left.

    It is never above `plan_as_pipedream`, whose space is part of this one or searched, too.
    """
    small, most = restricted(graph, placed_layers(graph)), _MOST_EXACT[len(devices.levels) > 1]
    every = all_prefixes(small, most)
    sets, notes = fewer_prefixes(small, most) if every is None else (every, ())
    return _search("default", graph, sets, devices, replace(choices or Choices(), fewer=True), notes)


def _search(
    planner: str,
    graph: LayerGraph,
    sets: tuple[int, ...],
    devices: Devices,
    choices: Choices,
    notes: tuple[str, ...] = (),
) -> Search:
    program = _LevelPrograms(graph, sets, devices, choices)
    stages = program.solve()
    if stages is None:
        return Search(None, why=program.why())
    return Search(Plan(planner, stages, PipeDreamCost(graph, devices, 1, choices.compression).rate(stages), notes))


class _LevelPrograms:
    """The dynamic programs of all levels, the innermost first, over the layers that are placed."""

    def __init__(self, graph: LayerGraph, sets: tuple[int, ...], devices: Devices, choices: Choices) -> None:
        self._graph, self._kept, self._devices, self._choices = graph, placed_layers(graph), devices, choices
        small = restricted(graph, self._kept)
        self._family = PrefixFamily(sets, len(self._kept))
        rows, layers = self._family.members.astype(np.float64), small.layers
        self._seconds: Floats = rows @ np.array([layer.seconds for layer in layers])
        self._parameters: Floats = rows @ np.array([layer.parameters for layer in layers])
        self._held: Floats = self._parameters + rows @ np.array([layer.output + layer.frozen for layer in layers])
        self._leaving = (
            None
            if choices.compression is None
            else np.array([boundary_bytes(small, prefix) for prefix in sets]) / choices.compression
        )
        self._below = [self._family.below(at) for at in range(len(sets))]
        self._tables: list[Floats] = []
        self._check_work()

    def _check_work(self) -> None:
        sets, pairs = len(self._family), sum(map(len, self._below))
        work = 0
        for at, level in enumerate(self._devices.levels):
            rows = 1 if at == len(self._devices.levels) - 1 else sets
            work += rows * pairs * level.units**2 // 2
        if work > _MOST_WORK:
            raise ConfigError(
                f"{sets:,} prefixes of the graph on {self._devices} devices are {work:.1e} comparisons, more than "
                f"{_MOST_WORK:.0e}; merge layers, or give fewer levels or devices"
            )

    def solve(self) -> tuple[PlannedStage, ...] | None:
        last = len(self._devices.levels) - 1
        for at in range(last + 1):
            self._tables.append(self._level(at, 1 if at == last else len(self._family)))
        if not math.isfinite(self._tables[-1][0, -1, -1]):
            return None
        return self._with_others(self._stages(last, 0, len(self._family) - 1, self._devices.levels[last].units))

    def why(self) -> str:
        states, units, longest = len(self._family) - 1, self._devices.levels[-1].units, self._longest()
        if self._choices.straight and not self._choices.fewer and longest < self._devices.count:
            return (
                f"a pipeline without replicas on {self._devices.count} devices needs as many stages, but the graph can "
                f"be cut into {longest} at most"
            )
        if self._devices.memory is not None:
            return (
                f"no plan fits: with {units} units every plan has a stage that stashes more than "
                f"{human_bytes(self._devices.memory, 2)} ({states} prefixes searched)"
            )
        return f"there is no plan on {self._devices} devices that uses all of them"

    def _longest(self) -> int:
        """Return the most stages that a plan can have."""
        most = [0] * len(self._family)
        for at in range(1, len(most)):
            most[at] = 1 + max(most[k] for k in self._below[at])
        return most[-1]

    def _stage_times(self, at: int, before: Places, after: int, replicas: int, first: bool) -> Floats:
        """Return the time of a stage that ends with a prefix, infinite where it does not fit.

        Returns:
            Times by the prefix behind which it begins, and by the units that are used with it, from `replicas` on.
        """
        level = self._devices.levels[at]
        # the time that one unit takes
        inner = self._tables[at - 1][before, after, -1] if at else self._seconds[after] - self._seconds[before]
        below = self._devices.levels[at - 1].units if at and first else 1
        parameters = self._parameters[after] - self._parameters[before]
        seconds = stage_seconds(inner, parameters, replicas, level.bandwidth, below)
        if self._leaving is not None and not first:
            rate = level.bandwidth * replicas
            seconds = np.maximum(seconds, 2 * self._leaving[before] / rate)
            if after < len(self._family) - 1:
                seconds = np.maximum(seconds, 2 * self._leaving[after] / rate)
        used = np.arange(replicas, level.units + 1)
        if self._devices.memory is None:
            return np.broadcast_to(seconds[:, None], (len(before), len(used)))
        stashed = (self._held[after] - self._held[before])[:, None] * np.ceil((level.units - used) / replicas)
        return np.where(stashed <= self._devices.memory, seconds[:, None], np.inf)

    def _level(self, at: int, rows: int) -> Floats:
        """Return T for the first prefixes to begin with, all prefixes to end with, and 0 to all units."""
        units = self._devices.levels[at].units
        most = 1 if self._choices.straight else units
        table = np.full((rows, len(self._family), units + 1), np.inf)
        for after in range(1, len(self._family)):
            below = self._below[after]
            starts = below[: np.searchsorted(below, rows)]
            for replicas in range(1, most + 1):
                alone = self._stage_times(at, starts, after, replicas, True)[:, 0]
                table[starts, after, replicas] = np.minimum(table[starts, after, replicas], alone)
            for replicas in range(1, min(most, units - 1) + 1):
                last = self._stage_times(at, below, after, replicas, False)
                before = table[:, below, : units + 1 - replicas]
                best = np.maximum(before, last[None]).min(axis=1)
                table[:, after, replicas:] = np.minimum(table[:, after, replicas:], best)
            if self._choices.fewer:
                table[:, after] = np.minimum.accumulate(table[:, after], axis=1)
        return table

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _stages(self, at: int, before: int, after: int, units: int) -> tuple[PlannedStage, ...]:
        """Return the stages of the best pipeline between two prefixes on so many units of a level."""
        table = self._tables[at]
        best = table[before, after, units]
        while self._choices.fewer and units > 1 and table[before, after, units - 1] == best:
            units -= 1
        most = 1 if self._choices.straight else units
        if units <= most and self._stage_times(at, np.array([before]), after, units, True)[0, 0] == best:
            return (self._stage(at, before, after, units),)
        below = self._below[after]
        for replicas in range(1, min(most, units - 1) + 1):
            last = self._stage_times(at, below, after, replicas, False)[:, units - replicas]
            hits = np.flatnonzero(np.maximum(table[before, below, units - replicas], last) == best)
            if len(hits):
                cut = int(below[hits[0]])
                return (*self._stages(at, before, cut, units - replicas), self._stage(at, cut, after, replicas))
        raise AssertionError("the table holds a time that no plan has")

    def _stage(self, at: int, before: int, after: int, replicas: int) -> PlannedStage:
        """Return a stage between two prefixes with the pipeline that each replica is."""
        units = self._devices.levels[at - 1].units if at else 0
        inner = self._stages(at - 1, before, after, units) if at else ()
        return PlannedStage(self._family.stage(before, after), replicas, inner=inner)

    def _with_others(self, stages: tuple[PlannedStage, ...]) -> tuple[PlannedStage, ...]:
        """Return stages with the numbers of the whole graph, and with the layers that were not placed.

        These go with the last placed layer that they read, or belong to the first stage.
        """
        places = {number: place for place, number in enumerate(self._kept)}
        homes = {
            number: max((places[edge.source] for edge in edges if edge.source in places), default=None)
            for number, edges in enumerate(self._graph.inputs)
            if number not in places
        }

        def renamed(stage: PlannedStage, first: bool) -> PlannedStage:
            inner = tuple(renamed(each, first and not at) for at, each in enumerate(stage.inner))
            more = [n for n, home in homes.items() if home in stage.layers or (home is None and first)]
            return replace(stage, layers=tuple(sorted([self._kept[p] for p in stage.layers] + more)), inner=inner)

        return tuple(renamed(stage, not at) for at, stage in enumerate(stages))
