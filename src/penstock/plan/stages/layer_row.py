"""Layers in one row, a topological order: what runs of them add up to, and what crosses the borders between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise, product
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import bandwidths
from penstock.plan.stages.planned import PlannedStage

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
"""A number of one stage, or of many at once."""
State = tuple[int, ...]
"""What later stages have to know of those before them, such as the devices that these use."""
Moves = Callable[[State], Iterable[tuple[State, Floats]]]
"""Yields what one more stage may do to a state, with the seconds of the stage by (begin, end)."""


def running_sums(values: Iterable[float]) -> Floats:
    """Return the sums up to each place, from 0 on."""
    return np.concatenate(([0.0], np.cumsum(list(values))))


def between(sums: Floats) -> Floats:
    """Return the sums of all runs: (first, the one after the last)."""
    return np.asarray(sums[None, :] - sums[:, None])


def later(sums: Floats) -> npt.NDArray[np.bool_]:
    """Return which runs have any layers: (first, the one after the last)."""
    return np.triu(np.ones((len(sums), len(sums)), dtype=bool), 1)


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


def row_stages(
    graph: LayerGraph, cuts: Sequence[int], replicas: Iterable[int] | None = None
) -> tuple[PlannedStage, ...]:
    """Return stages by where each begins in the row, and where the last one ends; of one replica if none are given."""
    counts = [1] * (len(cuts) - 1) if replicas is None else replicas
    ends = zip(pairwise(cuts), counts, strict=True)
    return tuple(PlannedStage(tuple(sorted(graph.order[a:b])), count) for (a, b), count in ends)


def near_cuts(cuts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts of which one end of a stage lies a layer elsewhere."""
    for at, step in product(range(1, len(cuts) - 1), (-1, 1)):
        moved = (*cuts[:at], cuts[at] + step, *cuts[at + 1 :])
        if moved[at - 1] < moved[at] < moved[at + 1]:
            yield moved


def row_notes(graph: LayerGraph) -> tuple[str, ...]:
    """Return what is to be said of cuts along the row: nothing if the layers stand in it anyway."""
    return () if is_in_order(graph) else ("cuts are along one order of layers",)


def is_in_order(graph: LayerGraph) -> bool:
    """Return whether each layer reads only those before it."""
    return graph.order == tuple(range(len(graph.layers)))


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


class _Move(NamedTuple):
    """A move of one stage from a state: by the end of the stage, its best begin, and the slowest stage up to there."""

    state: State
    begins: npt.NDArray[np.intp]
    seconds: Floats


class CutProgram:
    """Cuts a model, of which each place is the begin or the end of stages, into one more stage at a time.

    Attributes:
        least: seconds of the slowest stage so far, by state and by the place that has been reached.
    """

    def __init__(self, places: int, state: State = ()) -> None:
        start = np.full(places, np.inf)
        start[0] = 0.0
        self.least: dict[State, Floats] = {state: start}
        self._stages = list[dict[State, list[_Move]]]()

    def add_stage(self, moves: Moves) -> None:
        """Find the least seconds with one more stage."""
        found: dict[State, list[_Move]] = {}
        for state in sorted(self.least, reverse=True):
            for following, times in moves(state):
                through = np.maximum(self.least[state][:, None], times)
                found.setdefault(following, []).append(_Move(state, through.argmin(axis=0), through.min(axis=0)))
        self.least = {state: np.minimum.reduce([each.seconds for each in several]) for state, several in found.items()}
        self._stages.append(found)

    def add_stage_anyhow(self, times: Floats) -> None:
        """Do the same where a stage takes as long whatever those before it are."""
        self.add_stage(lambda state: [(state, times)])

    def trace(self, state: State) -> tuple[list[int], list[State]]:
        """Return where the stages of the best cut begin and the last one ends, and the states after them.

        Of equal ones those from larger states, then those from earlier places are the best.
        """
        cuts, states = [len(self.least[state]) - 1], list[State]()
        for found in reversed(self._stages):
            states.insert(0, state)
            end = cuts[0]
            best = min(found[state], key=lambda each: each.seconds[end])
            state = best.state
            cuts.insert(0, int(best.begins[end]))
        return cuts, states
