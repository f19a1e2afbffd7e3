"""A planner after PaSE (Elango, IPDPS 2021, arXiv 2407.04001): for each layer a data and a tensor degree.

There are no stages: the devices run one layer after the other. The configuration of a layer is a data degree d and a
tensor degree t with d t <= p devices: d parts of them take M / d microbatches of a batch each, and t share the layer.
The paper minimizes the sum over layers of their compute and communication, and over edges of what is sent where the
configurations of two layers differ. Here, per microbatch and with bandwidths B:

- compute, over d t; or what the profile measured for t devices, over d. That includes their communication.
- sums of activations within t devices, where the profile did not measure them: a ring, 2 (t - 1) / t of a layer's
  output forwards and of its inputs backwards, over d B.
- sums of gradients, once per batch: 2 (d - 1) / d of the parameters of a device, over M B.
- an edge: the part of its bytes that some device needs and does not hold, the most of all devices, forwards and again
  backwards. Layers begin and end with whole samples, so device n has part n // t of d, if it has one.

The paper divides every dimension of a layer, with one bandwidth; data and tensor degrees, which divide p, are what
profiles know of them. Links of the innermost level count for devices that all stand in one unit of it. Memory is not
part of the paper's search: it is counted for one microbatch, and compared with the limit afterwards.

The configurations of all layers are chosen at once so that the cost, a sum over layers and edges, is the least. This is
exact: a dynamic program over the graph in an order with small dependent sets (`least_sum`). Layers that follow each
other in topological order with one configuration are a stage of the plan; all stages run on the same devices, in turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.byte_sizes import human_bytes
from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import GraphLayer, LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, bandwidth_among
from penstock.plan.stages.layer_row import Floats
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating

MOST_CELLS = 20_000_000
"""Of a table; where one would be larger, `least_sum` gives up."""

_MOST_DEVICES = 4096
_IN_TURNS = (
    "stages are layers of one configuration, in turns on the same devices: computed here; Pipeline cannot run them"
)


class LayerConfiguration(NamedTuple):
    """How a layer is divided.

    Attributes:
        data: parts of the devices, which share the microbatches.
        tensor: devices of a part, which share the layer.
    """

    data: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.data * self.tensor


class PaseCost(GraphCost):
    """Rates configurations of layers. Of links up to two speeds count."""

    name = "pase"

    @cached_property
    def configurations(self) -> tuple[LayerConfiguration, ...]:
        """All that there are, in the order in which they are preferred where costs are equal.

        Raises:
            ConfigError: there are too many devices.
        """
        count = self.devices.count
        if count > _MOST_DEVICES:
            raise ConfigError(f"planner 'pase' divides layers among {_MOST_DEVICES} devices at most, got {count}")
        degrees = [degree for degree in range(1, count + 1) if count % degree == 0]
        data = [degree for degree in degrees if self.microbatches % degree == 0]
        found = [LayerConfiguration(d, t) for d in data for t in degrees if d * t <= count]
        return tuple(sorted(found, key=lambda each: (-each.devices, -each.data)))

    @cached_property
    def resharding(self) -> Floats:
        """Seconds for each byte of an edge, by the configurations of its source and its target."""
        every = np.array(self.configurations)
        data, tensor = every[:, 0, None], every[:, 1, None]
        device = np.arange(self.devices.count)
        has = device < data * tensor
        first = np.where(has, device // tensor / data, 0.0)
        last = np.where(has, first + 1 / data, 0.0)
        found = np.zeros((len(every), len(every)))
        for at, own in enumerate(self.configurations):
            both = np.minimum(last[at], last) - np.maximum(first[at], first)
            held = np.where(has[at] & has, np.maximum(both, 0.0), 0.0)
            missing = [np.where(has[at], 1 / own.data - held, 0.0), np.where(has, 1 / data - held, 0.0)]
            speeds = [
                bandwidth_among(self.devices, 0, max(own.devices, other.devices)) for other in self.configurations
            ]
            found[at] = sum(each.max(axis=1) for each in missing) / speeds
        return np.where(found < 1e-12 / self.devices.bandwidth, 0.0, found)  # rounding leaves some

    def choices(self, number: int) -> list[int]:
        """Return the configurations that a layer may have, by their numbers.

        Raises:
            ConfigError: there are none.
        """
        layer = self.graph.layers[number]
        measured = layer.tensor_degrees if _is_measured(layer) else None
        found = [at for at, each in enumerate(self.configurations) if measured is None or each.tensor in measured]
        if not found:
            degrees = ", ".join(map(str, sorted(measured or ())))
            raise ConfigError(
                f"layer {layer.name!r} has options for {degrees} devices, none of which divides {self.devices.count}; "
                "plan for another number of devices"
            )
        return found

    def parts(self, number: int, chosen: LayerConfiguration) -> dict[str, float]:
        """Return the seconds of a layer by cause, without those of its edges.

        Raises:
            ConfigError: it has no such configuration.
        """
        layer, (d, t) = self.graph.layers[number], chosen
        sums = 2 * (d - 1) / d / bandwidth_among(self.devices, 0, chosen.devices) / self.microbatches
        if _is_measured(layer):
            way = _fastest(layer, t)
            return {"compute": way.seconds / d, "links": 0.0, "gradient sums": sums * way.parameters}
        activations = layer.output + sum(edge.bytes for edge in self.graph.inputs[number])
        inner = self.devices.levels[0]
        near = inner.bandwidth if inner.units % t == 0 else self.devices.bandwidth
        return {
            "compute": layer.seconds / chosen.devices,
            "links": 2 * (t - 1) / t * activations / d / near,
            "gradient sums": sums * layer.parameters / t,
        }

    def memory(self, number: int, tensor: int) -> float:
        """Return the bytes of a layer on a device, with one microbatch."""
        layer = self.graph.layers[number]
        measured = _is_measured(layer)
        way = _fastest(layer, tensor) if measured else layer.ways[0]
        return (way.memory + way.memory_per_microbatch) / (1 if measured else tensor)

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs whose stages are groups of layers that take turns on the same devices.

        Raises:
            ConfigError: a layer has no way with the tensor degree of its stage.
        """
        if len(stages) > 1 and not all(stage.in_turns for stage in stages):
            return self.refused("its stages have devices of their own")
        known = {each: at for at, each in enumerate(self.configurations)}
        chosen = {n: LayerConfiguration(stage.replicas, stage.tensor) for stage in stages for n in stage.layers}
        unknown = next((each for each in chosen.values() if each not in known), None)
        if unknown is not None:
            degrees = f"{unknown.data} x {unknown.tensor}"
            return self.refused(f"degrees of {degrees} do not divide {self.devices.count} devices and the batch")
        ratings, held = list[StageRating](), 0.0
        for stage in stages:
            parts = {"compute": 0.0, "links": 0.0, "gradient sums": 0.0}
            for number in stage.layers:
                for part, seconds in self.parts(number, chosen[number]).items():
                    parts[part] += seconds
                for edge in self.graph.inputs[number]:
                    pair = known[chosen[edge.source]], known[chosen[number]]
                    parts["links"] += edge.bytes * float(self.resharding[pair])
            memory = sum(self.memory(number, stage.tensor) for number in stage.layers)
            held += memory
            ratings.append(StageRating(sum(parts.values()), parts, memory))
        fault = ""
        if held > self.limit:
            fault = f"all layers together need {human_bytes(held, 2)} of {human_bytes(self.devices.memory or 0, 2)}"
        return Rating(self.name, math.inf if fault else sum(each.seconds for each in ratings), tuple(ratings), fault)


def _is_measured(layer: GraphLayer) -> bool:
    """Return whether the profile has options of a layer, which know their tensor degrees."""
    return layer.forward is None or layer.tensor_degrees != {1}


def _fastest(layer: GraphLayer, tensor: int) -> Way:
    """Return the fastest way of a layer with a tensor degree."""
    ways = [way for way in layer.ways if way.tensor == tensor]
    if not ways:
        raise ConfigError(f"layer {layer.name!r} has no option with tensor degree {tensor}")
    return min(ways, key=lambda way: way.seconds)


# --- the search -------------------------------------------------------------------------------------------------------


class _Costs(NamedTuple):
    """Costs of choices.

    Attributes:
        of: the choices, ascending, one for each axis.
        values: what each combination costs.
    """

    of: tuple[int, ...]
    values: Floats


class _Decided(NamedTuple):
    """A choice that was decided.

    Attributes:
        number: of the choice.
        by: the choices that it depends on.
        best: its value, for each combination of these.
    """

    number: int
    by: tuple[int, ...]
    best: npt.NDArray[np.intp]


def least_sum(own: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]) -> list[int]:
    """Return the value of each choice with the least sum of tables, each of one choice or of two.

    As PaSE's dynamic program: choices are decided one by one, in an order in which each leaves a small dependent set,
    the undecided ones that share a table with it. For every combination of these its best value is kept, and what that
    costs is a table of them. A chain needs no set of more than one, however long it is.

    Args:
        own: what each value of each choice costs.
        pairs: what pairs of values cost, by two numbers of choices, the smaller one first.

    Raises:
        OverflowError: a table would have more than `MOST_CELLS` cells.
    """
    tables = [
        [_Costs((number,), values)] for number, values in enumerate(own)
    ]  # those of each choice, and of later ones
    near: list[set[int]] = [set() for _ in own]
    for (a, b), values in pairs.items():
        near[a].add(b)
        near[b].add(a)
        tables[a].append(_Costs((a, b), values))
        tables[b].append(tables[a][-1])
    sizes, left, decided = [len(values) for values in own], set(range(len(own))), list[_Decided]()
    cells = {number: _cells(sizes, number, near) for number in left}
    while left:
        number = min(left, key=lambda each: (cells[each], each))
        if cells[number] > MOST_CELLS:
            raise OverflowError
        rest = _decide(number, tables, sizes, decided)
        left.remove(number)
        for other in rest.of:
            near[other] |= set(rest.of) - {other}
            near[other].discard(number)
            tables[other] = [*(table for table in tables[other] if number not in table.of), rest]
        for other in rest.of:
            cells[other] = _cells(sizes, other, near)
    chosen = [0] * len(own)
    for each in reversed(decided):
        chosen[each.number] = int(each.best[tuple(chosen[other] for other in each.by)])
    return chosen


def _cells(sizes: Sequence[int], number: int, near: Sequence[set[int]]) -> int:
    """Return how many cells the table has with which a choice is decided."""
    found = sizes[number]
    for other in near[number]:
        found *= sizes[other]
    return found


def _decide(number: int, tables: Sequence[list[_Costs]], sizes: Sequence[int], decided: list[_Decided]) -> _Costs:
    """Decide a choice; return what its best value costs."""
    of = tuple(sorted({each for table in tables[number] for each in table.of}))
    total = np.zeros([sizes[each] for each in of])
    for table in tables[number]:
        total += table.values.reshape([sizes[each] if each in table.of else 1 for each in of])
    axis, by = of.index(number), tuple(each for each in of if each != number)
    decided.append(_Decided(number, by, np.asarray(total.argmin(axis=axis))))
    return _Costs(by, np.asarray(total.min(axis=axis)))


def plan_as_pase(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the fastest configurations.

    Raises:
        ConfigError: a layer has none for these devices, or the search would be too large.
    """
    cost = PaseCost(graph, devices, microbatches)
    every, options = cost.configurations, [cost.choices(number) for number in range(len(graph.layers))]
    own = [
        np.array([sum(cost.parts(number, every[at]).values()) for at in choices])
        for number, choices in enumerate(options)
    ]
    pairs = {}
    for source, target, size in graph.edges:
        seconds = size * cost.resharding[np.ix_(options[source], options[target])]
        pairs[min(source, target), max(source, target)] = seconds if source < target else seconds.T
    try:
        found = least_sum(own, pairs)
    except OverflowError:
        raise ConfigError(
            f"planner 'pase' would keep too many combinations of {len(every)} configurations for layers that are read "
            "together; merge layers, or plan for fewer devices"
        ) from None
    chosen = [every[choices[at]] for choices, at in zip(options, found, strict=True)]
    groups = [(each, tuple(numbers)) for each, numbers in groupby(graph.order, key=lambda number: chosen[number])]
    stages = tuple(PlannedStage(numbers, each.data, each.tensor, in_turns=True) for each, numbers in groups)
    rating = cost.rate(stages)
    if math.isinf(rating.seconds):
        return Search(None, why=f"the fastest configurations do not fit, and no others are looked for: {rating.fault}")
    return Search(Plan(PaseCost.name, stages, rating, (_IN_TURNS,) if len(stages) > 1 else ()))
