"""Piper's planner: stages with data and tensor degrees of their own and a way to execute each layer, in a memory limit.

The cost function (Tarnawski et al., NeurIPS 2021, sec. 3), as its authors released it (`algo.cpp`): a plan is as slow
as its busiest device, per microbatch ("sample"). A stage with data degree d and tensor degree t takes compute / d, plus
the bytes of its edges to other stages, twice (activation and gradient), with what the shards gather and scatter for
them, over d B, plus 4 (d - 1) P / (d N B) to add up P bytes of parameters once in N microbatches. A device holds
`memory` of all layers, and `memory_per_microbatch` of ceil(s / d) microbatches, where s adds up the data degrees of
this stage and those behind it.

The program (sec. 4) runs over prefixes from the last stage to the first: G[p, s] is
the least number of devices for the layers behind the prefix p if every stage takes at most T and the data degrees add
up to s at most; s says how many microbatches are in flight. The least T for which the devices suffice is found by
bisection, which needs no dimension for their number. Its answer is exact: a stage's knapsack enters with its lower
bound first, and is solved if a plan relies on it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.byte_sizes import human_bytes
from penstock.checks import check_whole
from penstock.errors import ConfigError
from penstock.plan.planners.piper_tables import EndTable, StageTables
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, held, homes_of
from penstock.plan.stages.layer_row import Floats
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating
from penstock.plan.stages.prefixes import PrefixFamily, fewer_prefixes, useful_prefixes

MOST_PREFIXES = 5_000
_MOST_SECONDS = 60.0  # to bring bounds together
_CLOSE = 1e-7  # relative: the bisection ends, and what is left is proven


@dataclass(frozen=True)
class PiperCost(GraphCost):
    """Rates plans of a graph. Of links the slowest level counts, as Piper knows one bandwidth."""

    name = "piper"

    def __post_init__(self) -> None:
        check_whole("microbatches", self.microbatches, 1, 1 << 20)

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs; replicas whose number does not divide N do not fit."""
        homes = homes_of(stages)
        ratings, faults = [], list[str]()
        ahead = sum(stage.replicas for stage in stages)
        if ahead > self.microbatches:
            faults.append(f"its data degrees add up to {ahead}, more than {self.microbatches} microbatches")
        for at, stage in enumerate(stages):
            if self.microbatches % stage.replicas:
                faults.append(f"stage {at}: {stage.replicas} replicas do not divide {self.microbatches} microbatches")
            in_flight = -(-ahead // stage.replicas)
            ahead -= stage.replicas
            ratings.append(self._stage(stage, at, homes, in_flight))
        used = sum(stage.devices for stage in stages)
        return self.rating(ratings, used, lambda: max(rating.seconds for rating in ratings), faults)

    def _stage(self, stage: PlannedStage, at: int, homes: dict[int, int], in_flight: int) -> StageRating:
        edges, ways = 0.0, self.ways(stage)
        for number, way in zip(stage.layers, ways, strict=True):
            for edge in self.graph.inputs[number]:
                if homes[edge.source] != at:
                    edges += 2 * (edge.bytes + way.sync_in.get(edge.source, 0.0))
            for edge in self.graph.readers[number]:
                if homes[edge.target] != at:
                    edges += 2 * (edge.bytes + way.sync_out.get(edge.target, 0.0))
        compute, parameters = sum(way.seconds for way in ways), sum(way.parameters for way in ways)
        d, bandwidth = stage.replicas, self.devices.bandwidth
        parts = {
            "compute": compute / d,
            "links": edges / d / bandwidth,
            "gradient sums": 4 * (d - 1) * parameters / d / self.microbatches / bandwidth,
        }
        return StageRating(sum(parts.values()), parts, held(ways, in_flight))


def plan_as_piper(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the plan with the least time per microbatch by Piper's cost function.

    Args:
        graph: the layers.
        devices: how many, with what memory; of bandwidths the least one counts.
        microbatches: per batch; the data degree of each stage divides it.

    Raises:
        ConfigError: the graph has too many prefixes.
    """
    sets = _prefixes(graph)
    if sets is None:
        raise ConfigError(
            f"planner piper: the graph has more than {MOST_PREFIXES:,} prefixes, too many for its dynamic program; "
            "merge layers of parallel branches, or use the default planner, which then cuts along fewer of them"
        )
    return _search("piper", PiperCost(graph, devices, microbatches), sets)


def _prefixes(graph: LayerGraph) -> tuple[int, ...] | None:
    """Return the prefixes among whose plans the best one is; None if there are too many."""
    degrees = frozenset[int]().union(*(layer.tensor_degrees for layer in graph.layers))
    free = {
        number
        for number, layer in enumerate(graph.layers)
        if not any(way.seconds or way.parameters or way.memory or way.memory_per_microbatch for way in layer.ways)
    }
    every = {number for number in free if graph.layers[number].tensor_degrees >= degrees}
    return useful_prefixes(graph, lambda number: number in (free if graph.inputs[number] else every), MOST_PREFIXES)


def plan_for_piper_cost(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the same plan as `plan_as_piper`, or, of a graph with too many prefixes, one along some of them."""
    every = _prefixes(graph)
    sets, notes = fewer_prefixes(graph, MOST_PREFIXES // 4) if every is None else (every, ())
    return _search("default", PiperCost(graph, devices, microbatches), sets, notes)


def _search(planner: str, cost: PiperCost, sets: tuple[int, ...], notes: tuple[str, ...] = ()) -> Search:
    program = _SuffixProgram(cost, PrefixFamily(sets, len(cost.graph.layers)))
    stages = program.solve()
    if stages is None:
        return Search(None, why=program.why())
    return Search(Plan(planner, stages, cost.rate(stages), notes + program.notes))


@dataclass(frozen=True)
class _Degree:
    """A tensor and a data degree that a stage may have."""

    tensor: int
    data: int
    price: float  # seconds per byte of parameters of a replica's time

    @property
    def devices(self) -> int:
        return self.tensor * self.data


class _Found(NamedTuple):
    """A stage of a plan that the program has found.

    Attributes:
        table, row: where its times stand.
        after: the prefix that it ends with.
        degree: on which devices.
        in_flight: microbatches in flight.
    """

    table: EndTable
    row: int
    after: int
    degree: _Degree
    in_flight: int


class _SuffixProgram:
    """The dynamic program, for one graph and one set of devices."""

    def __init__(self, cost: PiperCost, family: PrefixFamily) -> None:
        graph, devices, microbatches = cost.graph, cost.devices, cost.microbatches
        self._graph, self._family, self._devices = graph, family, devices
        self._most = min(microbatches, devices.count)
        data = [d for d in range(1, self._most + 1) if microbatches % d == 0]
        prices = {d: 4 * (d - 1) / (microbatches * devices.bandwidth) for d in data}
        self._tables = StageTables(graph, family, devices.bandwidth, devices.memory, self._most, prices)
        tensors = sorted({table.tensor for end in self._tables.ends for table in end})
        self._degrees = {
            tensor: [_Degree(tensor, d, prices[d]) for d in data if tensor * d <= devices.count] for tensor in tensors
        }
        self.notes: tuple[str, ...] = ()

    def solve(self) -> tuple[PlannedStage, ...] | None:
        best = self._bisected()
        if best is None:
            return None
        started = time.monotonic()
        while self._time_of(best) > 0:
            target = self._time_of(best) * (1 - 1e-9)
            found = self._feasible(target, True)
            if found is None:
                break
            if time.monotonic() - started > _MOST_SECONDS:
                self.notes = ("the time to prove it the best one ran out",)
                break
            settled = [self._tables.settle(table, row, after, y) for table, row, after, _, y in found]
            if not all(settled):
                self.notes = ("the ways of its layers are nearly the best: there are too many to try all",)
                break
            if self._time_of(found) < self._time_of(best):
                best = found
        return self._planned(best)

    def _bisected(self) -> list[_Found] | None:
        """Return the best plan by the upper bounds; None if nothing fits."""
        best = self._feasible(math.inf, False)
        if best is None:
            return None
        low, high = 0.0, self._time_of(best)
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            found = self._feasible(middle, False)
            if found is None:
                low = middle
            else:
                best, high = found, min(middle, self._time_of(found))
        return best

    def _feasible(self, limit: float, lower: bool) -> list[_Found] | None:
        """Return stages that take at most `limit`, by lower or upper bounds, on the least devices; None if too many."""
        least = self._least(limit, lower)
        if least[0].min() > self._devices.count:
            return None
        found, before, ahead = list[_Found](), 0, int(np.argmin(least[0]))
        while before < len(self._family) - 1:
            found.append(self._next(least, before, ahead, limit, lower))
            before, ahead = found[-1].after, ahead - found[-1].degree.data
        return found

    def _in_flight(self, table: EndTable, degrees: list[_Degree], limit: float, lower: bool) -> Floats:
        """Return the most that data degrees may add up to, by start and degree, such that the stage takes `limit` at
        most."""
        bounds = table.lower if lower else table.upper
        data = np.array([degree.data for degree in degrees])
        budgets = np.minimum(limit * data, 1e300)[None, :].repeat(len(table.starts), axis=0)
        if table.parameters is not None:
            budgets -= np.array([degree.price for degree in degrees])[None, :] * table.parameters[:, None]
        if bounds.shape[1] == 1:  # no limit of memory
            return np.where(bounds <= budgets, float(self._most), 0.0)
        counts = (bounds[:, None, :] <= budgets[:, :, None]).sum(axis=2)
        found: Floats = np.minimum(counts * data[None, :], self._most).astype(np.float64)
        return found

    def _degrees_of(self, table: EndTable) -> list[_Degree]:
        return [d for d in self._degrees[table.tensor] if table.parameters is not None or d.price == table.price]

    def _least(self, limit: float, lower: bool) -> Floats:
        """Return G, the least devices by prefix and sum of data degrees."""
        least = np.full((len(self._family), self._most + 1), np.inf)
        least[-1] = 0.0
        sums = np.arange(self._most + 1)
        for after in range(len(self._family) - 1, 0, -1):
            if least[after].min() > self._devices.count:
                continue
            padded = np.concatenate((np.full(self._most, np.inf), least[after]))
            for table in self._tables.ends[after]:
                degrees = self._degrees_of(table)
                if not degrees:
                    continue
                highest = self._in_flight(table, degrees, limit, lower)
                data = np.array([degree.data for degree in degrees])
                usable = highest >= data[None, :]
                always = highest >= self._most
                # more replicas than those that always suffice are of no use
                usable &= np.cumsum(always, axis=1) - always == 0
                rows, which = np.nonzero(usable)
                if not len(rows):
                    continue
                shifted = np.stack([padded[self._most - d.data : -d.data] + d.devices for d in degrees])
                found = np.where(sums[None, :] <= highest[rows, which][:, None], shifted[which], np.inf)
                firsts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
                starts = table.starts[rows[firsts]]
                least[starts] = np.minimum(least[starts], np.minimum.reduceat(found, firsts, axis=0))
        return least

    def _next(self, least: Floats, before: int, ahead: int, limit: float, lower: bool) -> _Found:
        """Return the stage that begins behind a prefix, of those with the least devices."""
        for after in range(len(self._family) - 1, before, -1):
            for table in self._tables.ends[after]:
                row = int(np.searchsorted(table.starts, before))
                if row == len(table.starts) or table.starts[row] != before:
                    continue
                degrees = [
                    degree
                    for degree in self._degrees_of(table)
                    if degree.data <= ahead
                    and least[before, ahead] == least[after, ahead - degree.data] + degree.devices
                ]
                highest = self._in_flight(table, degrees, limit, lower)[row] if degrees else ()
                for degree, most in zip(degrees, highest, strict=True):
                    if most >= ahead:
                        return _Found(table, row, after, degree, -(-ahead // degree.data))
        raise AssertionError("the program holds a number of devices that no plan has")

    def _time_of(self, stages: list[_Found]) -> float:
        """Return the time of the slowest stage, by the upper bounds of the tables."""
        times = []
        for table, row, _, degree, y in stages:
            shared = 0.0 if table.parameters is None else degree.price * float(table.parameters[row])
            bound = table.upper[row, 0 if table.upper.shape[1] == 1 else y - 1]
            times.append((float(bound) + shared) / degree.data)
        return max(times)

    def _planned(self, stages: list[_Found]) -> tuple[PlannedStage, ...]:
        """Return stages with the ways of their layers."""
        found, before = [], 0
        for table, _, after, degree, y in stages:
            layers = self._family.stage(before, after)
            chosen, _ = self._tables.ways(before, after, table.tensor, y, table.price)
            assert chosen is not None
            names = self._tables.names(layers, table.tensor, chosen)
            found.append(PlannedStage(layers, degree.data, table.tensor, names))
            before = after
        return tuple(found)

    def why(self) -> str:
        memory = self._devices.memory
        layers = self._graph.layers
        if memory is not None:
            least = [min(way.memory + way.memory_per_microbatch for way in layer.ways) for layer in layers]
            worst = int(np.argmax(least))
            if least[worst] > memory:
                return (
                    f"no plan fits: layer {layers[worst].name!r} alone needs {human_bytes(least[worst], 2)} with one "
                    f"microbatch in flight, more than {human_bytes(memory, 2)}"
                )
            total = sum(least)
            return (
                f"no plan fits: all layers need at least {human_bytes(total, 2)} with one microbatch in flight each, "
                f"and more with several; {self._devices} devices hold {human_bytes(memory, 2)} each"
            )
        return (
            f"no plan: no stage has a tensor degree of {self._devices.count} or fewer devices that all its layers have"
        )
