"""What every possible stage takes at least, by tensor degree and microbatches in flight: the tables of Piper's
program.

For the stage between the prefixes k and q, the ways of its layers are chosen by a knapsack for every number y of
microbatches in flight. The tables hold bounds of its answer; `StageTables.settle` replaces them by the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.knapsack import ChosenWays, best_ways, bounds_of_two
from penstock.plan.stages.layer_row import Floats
from penstock.plan.stages.prefixes import PrefixFamily

Places = npt.NDArray[np.intp]

_MOST_ENTRIES = 30_000_000
_MOST_AT_ONCE = 2_000_000  # numbers


@dataclass
class EndTable:
    """The stages that end with one prefix, at one tensor degree and price of parameters.

    Attributes:
        tensor: the degree.
        price: seconds per byte of parameters, added to the time of every layer.
        starts: the prefixes behind which they begin.
        lower, upper: bounds of the time of one replica, by start and microbatches in flight (from 1 on, at 0).
        parameters: bytes, where all ways of a layer have the same; then the price is 0 and is added for all at once.
    """

    tensor: int
    price: float
    starts: Places
    lower: Floats
    upper: Floats
    parameters: Floats | None


class _DegreeArrays:
    """The ways of all layers at one tensor degree, as arrays; missing ones take for ever."""

    def __init__(self, graph: LayerGraph, tensor: int, bandwidth: float) -> None:
        self.ways: list[list[Way]] = [[w for w in layer.ways if w.tensor == tensor] for layer in graph.layers]
        count = max(2, max(map(len, self.ways)))
        layers, edges = len(graph.layers), len(graph.edges)
        self.has = np.array([bool(ways) for ways in self.ways])
        self.seconds, self.parameters, self.memory, self.each = (np.zeros((layers, count)) for _ in range(4))
        self.seconds[:] = np.inf
        self.into, self.out = np.zeros((edges, layers, count)), np.zeros((edges, layers, count))
        for at, ways in enumerate(self.ways):
            for number, way in enumerate(ways):
                self.seconds[at, number] = way.seconds
                self.parameters[at, number] = way.parameters
                self.memory[at, number], self.each[at, number] = way.memory, way.memory_per_microbatch
            for number in range(len(ways), count):  # as dear as it gets, and of no use
                self.parameters[at, number] = self.parameters[at, 0]
                self.memory[at, number], self.each[at, number] = self.memory[at, 0], self.each[at, 0]
        for number, edge in enumerate(graph.edges):
            for choice, way in enumerate(self.ways[edge.target]):
                self.into[number, edge.target, choice] = 2 * (edge.bytes + way.sync_in.get(edge.source, 0.0))
            for choice, way in enumerate(self.ways[edge.source]):
                self.out[number, edge.source, choice] = 2 * (edge.bytes + way.sync_out.get(edge.target, 0.0))
        self.into, self.out = self.into / bandwidth, self.out / bandwidth
        self.alike = bool((self.parameters == self.parameters[:, :1]).all())
        self.count = count


class StageTables:
    """The tables of all stages of a family of prefixes.

    Args:
        graph: the layers.
        family: the prefixes.
        bandwidth: bytes per second.
        memory: bytes of a device.
        most: the most microbatches that may be in flight.
        prices: of parameters, one for each data degree.
    """

    def __init__(
        self,
        graph: LayerGraph,
        family: PrefixFamily,
        bandwidth: float,
        memory: float | None,
        most: int,
        prices: dict[int, float],
    ) -> None:
        self._graph, self._family = graph, family
        self._limit = np.inf if memory is None else memory * TOLERANCE
        self._most, self._prices = most if memory is not None else 1, prices
        degrees = sorted(set.union(*(set(layer.tensor_degrees) for layer in graph.layers)))
        self._degrees = {tensor: _DegreeArrays(graph, tensor, bandwidth) for tensor in degrees}
        sources = np.array([edge.source for edge in graph.edges], dtype=np.intp)
        targets = np.array([edge.target for edge in graph.edges], dtype=np.intp)
        self._begun, self._unread = family.members[:, sources], ~family.members[:, targets]
        self._below = [family.below(at) for at in range(len(family))]
        self._refuse_too_many()
        self.ends: list[list[EndTable]] = [self._end(at) for at in range(len(family))]

    def _refuse_too_many(self) -> None:
        entries = sum(map(len, self._below)) * self._most * len(self._degrees)
        if entries > _MOST_ENTRIES:
            raise ConfigError(
                f"{len(self._family):,} prefixes of the graph are {entries:,} stages to look at, more than "
                f"{_MOST_ENTRIES:,}; merge layers of parallel branches, or give fewer devices"
            )

    def _end(self, at: int) -> list[EndTable]:
        """Return the tables of the stages that end with a prefix."""
        found = []
        for tensor, arrays in self._degrees.items():
            below = self._below[at]
            inside = self._family.members[at][None, :] & ~self._family.members[below]
            usable = ~(inside & ~arrays.has[None, :]).any(axis=1)
            starts, inside = below[usable], inside[usable]
            if not len(starts):
                continue
            seconds = self._seconds(at, starts, arrays)
            parameters = (inside * arrays.parameters[None, :, 0]).sum(axis=1)
            for price in [0.0] if arrays.alike else sorted(set(self._prices.values())):
                priced = seconds + price * arrays.parameters[None]
                lower, upper = self._bounds(priced, arrays, inside)
                found.append(EndTable(tensor, price, starts, lower, upper, parameters if arrays.alike else None))
        return found

    def _seconds(self, at: int, starts: Places, arrays: _DegreeArrays) -> Floats:
        """Return the times of the ways of all layers (stage, layer, way), edges to other stages included."""
        layers = len(self._graph.layers)
        came = self._begun[starts].astype(np.float64) @ arrays.into.reshape(-1, layers * arrays.count)
        goes = self._unread[at].astype(np.float64) @ arrays.out.reshape(-1, layers * arrays.count)
        found: Floats = arrays.seconds[None] + (came + goes[None]).reshape(len(starts), layers, arrays.count)
        return found

    def _bounds(self, seconds: Floats, arrays: _DegreeArrays, inside: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return bounds by stage and microbatches in flight."""
        lower = np.full((len(inside), self._most), np.inf)
        upper = lower.copy()
        fastest = np.where(inside, seconds.min(axis=2), 0.0).sum(axis=1)
        if not np.isfinite(self._limit):
            lower[:, 0] = upper[:, 0] = fastest
            return lower, upper
        which = np.argmin(seconds, axis=2)
        fast_held = np.where(inside, _chosen(arrays.memory, which), 0.0).sum(axis=1)
        fast_each = np.where(inside, _chosen(arrays.each, which), 0.0).sum(axis=1)
        rows, flights = list[Places](), list[Places]()
        for y in range(1, self._most + 1):
            sizes = arrays.memory + y * arrays.each
            possible = inside.astype(np.float64) @ sizes.min(axis=1) <= self._limit
            if not possible.any():
                break
            free = fast_held + y * fast_each <= self._limit
            lower[free, y - 1] = upper[free, y - 1] = fastest[free]
            rows.append(np.flatnonzero(possible & ~free))
            flights.append(np.full(len(rows[-1]), y))
        tight, in_flight = np.concatenate([*rows, []]).astype(np.intp), np.concatenate([*flights, []])
        step = max(1, _MOST_AT_ONCE // max(seconds[0].size, 1))
        for at in range(0, len(tight), step):
            some, y_some = tight[at : at + step], in_flight[at : at + step]
            all_sizes = arrays.memory[None] + y_some[:, None, None] * arrays.each[None]
            low, high = self._tight(seconds[some], all_sizes, inside[some], arrays.count)
            places = some, y_some.astype(np.intp) - 1
            lower[places], upper[places] = low, high
        return lower, upper

    def _tight(
        self, seconds: Floats, sizes: Floats, inside: npt.NDArray[np.bool_], count: int
    ) -> tuple[Floats, Floats]:
        """Return bounds where not every layer can have its fastest way."""
        if count == 2:
            return bounds_of_two(seconds, sizes, inside, self._limit)
        low, high = np.empty(len(seconds)), np.empty(len(seconds))
        for at in range(len(seconds)):
            found, exact = best_ways([*seconds[at][inside[at]]], [*sizes[at][inside[at]]], self._limit)
            high[at] = np.inf if found is None else found.seconds
            low[at] = high[at] if exact else np.where(inside[at], seconds[at].min(axis=1), 0.0).sum()
        return low, high

    def ways(
        self, before: int, after: int, tensor: int, in_flight: int, price: float
    ) -> tuple[ChosenWays | None, bool]:
        """Return the best ways of the layers of a stage, ascending, and whether no others are better."""
        arrays = self._degrees[tensor]
        layers = np.array(self._family.stage(before, after))
        seconds = self._seconds(after, np.array([before]), arrays)[0] + price * arrays.parameters
        sizes = arrays.memory + in_flight * arrays.each
        return best_ways([*seconds[layers]], [*sizes[layers]], self._limit)

    def names(self, layers: tuple[int, ...], tensor: int, chosen: ChosenWays) -> tuple[str, ...]:
        ways = self._degrees[tensor].ways
        return tuple(ways[layer][way].name for layer, way in zip(layers, chosen.ways, strict=True))

    def settle(self, table: EndTable, row: int, after: int, in_flight: int) -> bool:
        """Replace the bounds of a stage by its exact time; returns whether they could be brought together."""
        y = 0 if len(table.lower[row]) == 1 else in_flight - 1
        if table.lower[row, y] == table.upper[row, y]:
            return True
        found, exact = self.ways(int(table.starts[row]), after, table.tensor, in_flight, table.price)
        if not exact:
            return False
        table.lower[row, y] = table.upper[row, y] = np.inf if found is None else found.seconds
        return True


def _chosen(values: Floats, which: Places) -> Floats:
    """Return the value of the chosen way, by stage and layer."""
    return np.take_along_axis(np.broadcast_to(values, (*which.shape, values.shape[1])), which[:, :, None], axis=2)[
        :, :, 0
    ]
