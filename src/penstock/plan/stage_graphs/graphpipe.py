"""GraphPipe's planner: a model with branches is divided into a graph of stages.

After Jeon et al., "GraphPipe" (arXiv 2406.17145): the slowest stage is to be as fast as can be; for each bound on it, a
dynamic program over the model as a series of parts finds whether there are enough devices, and the division with the
fewest stages on the longest way. A stage is a run of parts that follow each other, of the whole model or within a
branch. The paper's choice among microbatch sizes of stages is not there: all have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stage_graphs.graphpipe_cost import GraphPipeCost, StageWork
from penstock.plan.stage_graphs.nested_series import Branches, Series, layers_of, nested_series
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.planned import Plan, PlannedStage, Search

Depths = npt.NDArray[np.int64]
"""The stages on the longest way to an end, by the number of devices that there are at most."""
Floats = npt.NDArray[np.float64]

_NONE = 1 << 40  # more stages than there can be: no division
_MOST_LAYERS = 1000
_NEAR = 1e-9  # how near the time of the slowest stage is to the least one
_BOUNDS = 12  # on the slowest stage, above the least one, that are tried for the least time of a batch
_NOTE = "stages that form a graph are computed here; penstock train runs chains"


def plan_as_graphpipe(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the plan whose slowest stage is fastest and, of these, has the shortest way.

    Raises:
        ConfigError: the graph is too large.
    """
    search = GraphPipeSearch(graph, devices, microbatches)
    plan = search.fastest()
    return Search(plan) if plan is not None else Search(None, why="no plan fits: no division into stages fits")


def plan_for_graphpipe_cost(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the plan whose batch takes least time among those with the shortest way for a bound on the slowest stage.

    Raises:
        ConfigError: the graph is too large.
    """
    search = GraphPipeSearch(graph, devices, microbatches)
    least = search.fastest()
    if least is None:
        return Search(None, why="no plan fits: no division into stages fits")
    fastest = least.rating.slowest_seconds
    bounds = np.geomspace(fastest, max(graph.seconds, fastest), _BOUNDS) if fastest > 0 else ()
    plans = [least, *(plan for bound in bounds if (plan := search.within(float(bound))) is not None)]
    return Search(min(plans, key=lambda plan: plan.rating.seconds))


class _Runs(NamedTuple):
    """Runs of parts of a series, each as a stage: arrays by the first part and by the one after the last.

    Attributes:
        work: what it does, with arrays for numbers.
        held: bytes that a replica holds anyway.
        each: bytes that it holds per microbatch in flight.
    """

    work: StageWork[Floats]
    held: Floats
    each: Floats


class _Table(NamedTuple):
    """The best divisions of the end of a series: arrays by its first part, and by the number of devices at most.

    Attributes:
        depths: as of `Depths`.
        ends: where the first stage ends; the part itself where its branches are divided.
        counts: replicas of the first stage; or devices of all branches.
    """

    depths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class GraphPipeSearch:
    """Divisions of a graph of layers.

    Args:
        graph: the layers.
        devices: at most so many.
        microbatches: M, per batch.

    Raises:
        ConfigError: the graph is too large.
    """

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        if len(graph.layers) > _MOST_LAYERS:
            raise ConfigError(
                f"planner 'graphpipe' takes at most {_MOST_LAYERS} layers, and the profile has {len(graph.layers)}; "
                "merge some"
            )
        self._graph, self._devices, self._m = graph, devices, microbatches
        self._cost, self._series = GraphPipeCost(graph, devices, microbatches), nested_series(graph)
        self._runs: dict[Series, _Runs] = {}
        self._bound = math.inf
        self._replicas: dict[Series, npt.NDArray[np.int64]] = {}  # the fewest that keep to the bound, for each run
        self._tables: dict[tuple[Series, int], _Table] = {}

    def fastest(self) -> Plan | None:
        """Return the plan with the least time of the slowest stage; None if none fits."""
        best = self.within(math.inf)
        low = 0.0
        while best is not None and best.rating.slowest_seconds - low > _NEAR * best.rating.slowest_seconds:
            bound = (low + best.rating.slowest_seconds) / 2
            found = self.within(bound)
            if found is None:
                low = bound
            else:
                best = found
        return best

    def within(self, bound: float) -> Plan | None:
        """Return the plan with the shortest way whose stages take so many seconds at most; None if there is none."""
        self._bound = bound
        self._tables.clear()
        self._replicas.clear()
        count = self._devices.count
        if self._table(self._series, 0).depths[0, count] >= _NONE:
            return None
        stages = tuple(self._stages(self._series, count, 0))
        chain = all(isinstance(part, int) for part in self._series.parts)
        return Plan(GraphPipeCost.name, stages, self._cost.rate(stages), () if chain else (_NOTE,))

    # --- the dynamic program ------------------------------------------------------------------------------------------

    def _table(self, series: Series, after: int) -> _Table:
        """Return the best divisions of a series, where a way of so many stages follows it."""
        if (series, after) not in self._tables:
            shape = len(series.parts) + 1, self._devices.count + 1
            table = _Table(*(np.full(shape, _NONE, dtype=np.int64) for _ in range(3)))
            table.depths[-1] = after
            for first in reversed(range(len(series.parts))):
                self._divide(table, series, first)
                part = series.parts[first]
                if isinstance(part, Branches):
                    self._divide_branches(table, part, first)
            self._tables[series, after] = table
        return self._tables[series, after]

    def _divide(self, table: _Table, series: Series, first: int) -> None:
        """Find the best divisions from a part on that begin with a run of parts as a stage."""
        runs, replicas = self._runs_of(series), self._fewest(series)[first, first + 1 :]
        left = np.arange(self._devices.count + 1) - replicas[:, None]
        ends = np.arange(first + 1, len(series.parts) + 1)
        depths = np.where(left >= 0, table.depths[ends[:, None], np.maximum(left, 0)] + 1, _NONE)
        if self._devices.memory is not None:
            flight = np.minimum(depths, self._m)
            held = runs.held[first, first + 1 :, None] + flight * runs.each[first, first + 1 :, None]
            depths = np.where(held <= self._devices.memory * TOLERANCE, depths, _NONE)
        best = depths.argmin(axis=0)
        table.depths[first] = np.minimum(depths[best, np.arange(len(best))], _NONE)
        table.ends[first], table.counts[first] = ends[best], replicas[best]

    def _divide_branches(self, table: _Table, part: Branches, first: int) -> None:
        """Take divisions in which each branch has stages of its own, where they are better."""
        rest = table.depths[first + 1].tolist()
        for left, after in enumerate(rest):
            if after >= _NONE or (left and rest[left - 1] == after):
                continue  # more devices for the rest help only where they make its way shorter
            depths = self._together(part, after)[: len(rest) - left]
            better = depths < table.depths[first, left:]
            table.depths[first, left:][better] = depths[better]
            table.ends[first, left:][better] = first
            table.counts[first, left:][better] = np.flatnonzero(better)

    def _together(self, part: Branches, after: int) -> Depths:
        """Return the longest way of branches, by the number of devices for all of them."""
        each = [self._table(series, after).depths[0] for series in part.series]
        found = np.full(self._devices.count + 1, _NONE, dtype=np.int64)
        for depth in sorted(set(np.concatenate(each).tolist()), reverse=True):
            if all(depths[-1] <= depth < _NONE for depths in each):
                found[sum(_needed(depths, depth) for depths in each) :] = depth
        return found

    def _fewest(self, series: Series) -> npt.NDArray[np.int64]:
        """Return with how few replicas each run keeps to the bound; more than there are devices if with none."""
        if series not in self._replicas:
            work, most = self._runs_of(series).work, self._devices.count
            found = np.full(work.seconds.shape, most + 1, dtype=np.int64)
            for count in range(most, 0, -1):
                seconds = self._cost.seconds(work, count)
                found[seconds <= self._bound] = count
            self._replicas[series] = found
        return self._replicas[series]

    def _runs_of(self, series: Series) -> _Runs:
        """Return what every run of parts of a series does and holds."""
        if series not in self._runs:
            numbers = [self._numbers(series, first) for first in range(len(series.parts))]
            seconds, read, parameters, held, each = np.moveaxis(np.array(numbers), 2, 0)
            self._runs[series] = _Runs(StageWork(seconds, read, parameters), held, each)
        return self._runs[series]

    def _numbers(self, series: Series, first: int) -> Floats:
        """Return the numbers of all runs from a part on: (the part after the last, number)."""
        rows, inside = np.zeros((len(series.parts) + 1, 5)), set[int]()
        for at in range(first, len(series.parts)):
            added = list(layers_of(series.parts[at]))
            inside.update(added)
            layers = [self._graph.layers[number] for number in added]
            rows[at + 1] = rows[at] + (
                sum(layer.seconds for layer in layers),
                sum(edge.bytes for n in added for edge in self._graph.inputs[n] if edge.source not in inside),
                sum(layer.parameters for layer in layers),
                sum(layer.ways[0].memory for layer in layers),
                sum(layer.ways[0].memory_per_microbatch for layer in layers),
            )
        return rows

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _stages(self, series: Series, count: int, after: int) -> Iterator[PlannedStage]:
        """Yield the stages of the best division on so many devices."""
        table, first = self._table(series, after), 0
        while first < len(series.parts):
            end, used = int(table.ends[first, count]), int(table.counts[first, count])
            if end > first:
                layers = (layer for part in series.parts[first:end] for layer in layers_of(part))
                yield PlannedStage(tuple(sorted(layers)), used)
            else:
                part, end = series.parts[first], first + 1
                assert isinstance(part, Branches)
                rest = int(table.depths[end, count - used])
                depth = int(self._together(part, rest)[used])
                for branch in part.series:
                    yield from self._stages(branch, _needed(self._table(branch, rest).depths[0], depth), rest)
            first, count = end, count - used


def _needed(depths: Depths, depth: int) -> int:
    """Return the least number of devices with which a way is no longer."""
    return int(np.argmax(depths <= depth))
