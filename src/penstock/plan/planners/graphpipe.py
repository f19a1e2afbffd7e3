"""GraphPipe's planner: a model with branches is divided into a graph of stages.

After Jeon et al., "GraphPipe" (arXiv 2406.17145). Of stages that may run side by side none waits for another one. So a
stage keeps as many microbatches as there are stages on the longest way from it to an end, not as there are stages after
it in a row, and a batch is filled and drained over the longest way.

The slowest stage is to be as fast as can be; for each bound on it, a dynamic program over the model as a series of
parts finds whether there are enough devices, and the division with the fewest stages on the longest way. A stage is a
run of parts that follow each other, of the whole model or within a branch. The paper's choice among microbatch sizes of
stages is not there: all have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Generic, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, held, homes_of
from penstock.plan.stages.layer_row import Floats, Number
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating

Depths = npt.NDArray[np.int64]
"""The stages on the longest way to an end, by the number of devices that there are at most."""

_NONE = 1 << 40  # more stages than there can be: no division
_MOST_LAYERS = 1000
_NEAR = 1e-9  # how near the time of the slowest stage is to the least one
_BOUNDS = 12  # on the slowest stage, above the least one, that are tried for the least time of a batch
_NOTE = "stages that form a graph are computed here; penstock train runs chains"


# --- the model as a series of parts -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Branches:
    """Branches between which no edge runs."""

    series: tuple[Series, ...]

    @property
    def layers(self) -> Iterator[int]:
        return (layer for series in self.series for layer in series.layers)


Part = int | Branches
"""A layer, by its number, or branches."""


@dataclass(frozen=True, eq=False)
class Series:
    """Parts in an order in which each reads only from those before it, and from layers before the series."""

    parts: tuple[Part, ...]

    @property
    def layers(self) -> Iterator[int]:
        return (layer for part in self.parts for layer in layers_of(part))


def layers_of(part: Part) -> Iterable[int]:
    """Return the numbers of the layers of a part."""
    return (part,) if isinstance(part, int) else part.layers


def nested_series(graph: LayerGraph) -> Series:
    """Return the layers of a graph as a series.

    A layer that is before or after every other one divides the graph; what lies between two of them falls into branches
    where no edge joins them. Where nothing divides layers that edges join, they follow each other in topological order.
    """
    return _SeriesFinder(graph).find(graph.order)


class _SeriesFinder:
    """Divides sets of layers; sets are the bits of whole numbers."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        before, after = [0] * len(graph.layers), [0] * len(graph.layers)
        for number in graph.order:
            for edge in graph.readers[number]:
                before[edge.target] |= before[number] | 1 << number
        for number in reversed(graph.order):
            for edge in graph.inputs[number]:
                after[edge.source] |= after[number] | 1 << number
        self._related = [b | a | 1 << number for number, (b, a) in enumerate(zip(before, after, strict=True))]

    def find(self, layers: Iterable[int]) -> Series:
        """Return some layers, which are given in topological order, as a series."""
        layers = tuple(layers)
        everything = sum(1 << number for number in layers)
        parts, between = list[Part](), list[int]()
        for number in layers:
            if everything & ~self._related[number]:
                between.append(number)
            else:
                parts += (*self._between(between), number)
                between = []
        return Series((*parts, *self._between(between)))

    def _between(self, layers: list[int]) -> Iterator[Part]:
        """Yield the parts that layers between two dividing ones are."""
        branches = self._joined(layers)
        if len(branches) > 1:
            yield Branches(tuple(self.find(branch) for branch in branches))
        else:
            yield from layers

    def _joined(self, layers: list[int]) -> list[list[int]]:
        """Return the sets of layers that edges among them join, each in topological order."""
        left, found = set(layers), list[list[int]]()
        for number in layers:
            if number not in left:
                continue
            reached, rest = {number}, [number]
            while rest:
                at = rest.pop()
                ends = {e.target for e in self._graph.readers[at]} | {e.source for e in self._graph.inputs[at]}
                rest += (ends & left) - reached
                reached |= ends & left
            left -= reached
            found.append([each for each in layers if each in reached])
        return found


# --- the cost ---------------------------------------------------------------------------------------------------------


class StageWork(NamedTuple, Generic[Number]):
    """What a stage does for each microbatch; or what several do, as arrays.

    Attributes:
        seconds: of compute.
        read: bytes that it reads of other stages.
        parameters: bytes of which it adds up gradients, once per batch.
    """

    seconds: Number
    read: Number
    parameters: Number


class GraphPipeCost(GraphCost):
    """Rates plans whose stages form a graph, with replicas on single devices.

    A stage with r replicas takes, per microbatch, its compute over r, what it reads of other stages and the gradients
    of that over r and the bandwidth, and the sum of its gradients, 2 (r - 1) / r of the parameters, over the bandwidth
    and M. A batch takes M - 1 times the slowest stage and the stages on the slowest way through the graph. Of links
    the slowest level counts.
    """

    name = "graphpipe"

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return self.refused("its stages are not replicated on single devices")
        following = self._following(stages)
        try:
            last_first = tuple(TopologicalSorter(following).static_order())
        except CycleError:
            return self.refused("its stages read each other in a cycle")
        depth = [1] * len(stages)
        for at in last_first:
            depth[at] = 1 + max((depth[after] for after in following[at]), default=0)
        ratings = tuple(self._stage(stage, depth[at]) for at, stage in enumerate(stages))
        way = [0.0] * len(stages)
        for at in last_first:
            way[at] = ratings[at].seconds + max((way[after] for after in following[at]), default=0.0)
        batch = (self.microbatches - 1) * max(rating.seconds for rating in ratings) + max(way)
        used = sum(stage.replicas for stage in stages)
        return self.rating(ratings, used, lambda: batch / self.microbatches)

    def parts(self, work: StageWork[Number], replicas: int) -> dict[str, Number]:
        """Return the seconds of a stage by cause."""
        bandwidth = self.devices.bandwidth
        return {
            "compute": work.seconds / replicas,
            "links": 2 * work.read / bandwidth / replicas,
            "gradient sums": 2 * (1 - 1 / replicas) * work.parameters / bandwidth / self.microbatches,
        }

    def seconds(self, work: StageWork[Number], replicas: int) -> Number:
        compute, links, sums = self.parts(work, replicas).values()
        return compute + links + sums

    def _stage(self, stage: PlannedStage, depth: int) -> StageRating:
        inside = set(stage.layers)
        layers = [self.graph.layers[number] for number in stage.layers]
        read = sum(edge.bytes for edge in self.graph.edges if edge.target in inside and edge.source not in inside)
        work = StageWork(sum(layer.seconds for layer in layers), read, sum(layer.parameters for layer in layers))
        memory = held((layer.ways[0] for layer in layers), min(depth, self.microbatches))
        return StageRating(self.seconds(work, stage.replicas), self.parts(work, stage.replicas), memory)

    def _following(self, stages: tuple[PlannedStage, ...]) -> dict[int, set[int]]:
        """Return for each stage those that read of it."""
        homes = homes_of(stages)
        found = {at: set[int]() for at in range(len(stages))}
        for edge in self.graph.edges:
            if homes[edge.source] != homes[edge.target]:
                found[homes[edge.source]].add(homes[edge.target])
        return found


# --- the search -------------------------------------------------------------------------------------------------------


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
        flight = np.minimum(depths, self._m)
        nbytes = runs.held[first, first + 1 :, None] + flight * runs.each[first, first + 1 :, None]
        depths = np.where(nbytes <= self._cost.limit, depths, _NONE)
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
