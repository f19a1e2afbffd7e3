"""Layers in one row, a topological order: what runs of them add up to, and what crosses the borders between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import PlannedStage
from penstock.plan.stages.two_bw_cost import bandwidths

Floats = npt.NDArray[np.float64]


def running_sums(values: Iterable[float]) -> Floats:
    """Return the sums up to each place, from 0 on."""
    return np.concatenate(([0.0], np.cumsum(list(values))))


def border_bytes(graph: LayerGraph) -> Floats:
    """Return the bytes that cross each border; whatever reads further on passes all borders before it.

    Returns:
        An entry for each layer, of the border before it, and one for the end; the ends are 0.
    """
    found = np.zeros(len(graph.layers) + 1)
    places = {number: at for at, number in enumerate(graph.order)}
    for edge in graph.edges:
        found[places[edge.source] + 1 : places[edge.target] + 1] += edge.bytes
    return found


def border_bytes_of(graph: LayerGraph, stages: tuple[PlannedStage, ...]) -> list[float]:
    """Return the bytes that cross the border before each stage, and after the last one."""
    homes = {number: at for at, stage in enumerate(stages) for number in stage.layers}
    ends = [(homes[edge.source], homes[edge.target], edge.bytes) for edge in graph.edges]
    return [sum(size for a, b, size in ends if a < at <= b) for at in range(len(stages) + 1)]


def row_stages(graph: LayerGraph, cuts: tuple[int, ...]) -> tuple[PlannedStage, ...]:
    """Return stages by where each begins in the row, and where the last one ends."""
    return tuple(PlannedStage(tuple(sorted(graph.order[a:b]))) for a, b in pairwise(cuts))


def single_device_options(graph: LayerGraph, who: str) -> list[tuple[Way, ...]]:
    """Return the ways of each layer to run on one device.

    Args:
        graph: the layers.
        who: needs them, for the message.

    Raises:
        ConfigError: a layer has none.
    """
    found = [tuple(way for way in layer.ways if way.tensor == 1) for layer in graph.layers]
    for layer, ways in zip(graph.layers, found, strict=True):
        if not ways:
            raise ConfigError(f"{who} puts layers on single devices; layer {layer.name!r} needs several")
    return found


def depths_by_link(devices: Devices, deepest: int) -> Iterator[tuple[float, list[int]]]:
    """Yield the bandwidth between stages on single devices, and the numbers of stages that it is the bandwidth of."""
    depths = range(1, deepest + 1)
    return ((speed, list(same)) for speed, same in groupby(depths, lambda depth: bandwidths(devices, 1, depth)[1]))
