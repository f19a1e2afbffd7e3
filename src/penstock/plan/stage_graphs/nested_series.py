"""A graph of layers as a series of parts, each a layer, or branches between which no edge runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.plan.profile.layer_graph import LayerGraph


@dataclass(frozen=True, eq=False)
class Branches:
    """Branches between which no edge runs."""

    series: tuple[Series, ...]

    @property
    def layers(self) -> Iterator[int]:
        """The numbers of all layers."""
        return (layer for series in self.series for layer in series.layers)


Part = int | Branches
"""A layer, by its number, or branches."""


@dataclass(frozen=True, eq=False)
class Series:
    """Parts in an order in which each reads only from those before it, and from layers before the series."""

    parts: tuple[Part, ...]

    @property
    def layers(self) -> Iterator[int]:
        """The numbers of all layers, in order."""
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
