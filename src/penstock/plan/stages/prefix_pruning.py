"""Layers whose place costs nothing: with them out of the way, a graph with side inputs has few prefixes.

A layer that takes neither time nor memory, and whose one reader receives no fewer bytes from it than it reads, may
stand in the stage of that reader: no stage of any plan becomes dearer. A source that takes nothing and sends nothing
may stand in the first stage. So the best plan is among those whose prefixes keep such layers there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.plan.profile.layer_graph import LayerEdge, LayerGraph
from penstock.plan.stages.layer_ideals import all_prefixes


def useful_prefixes(graph: LayerGraph, free: Callable[[int], bool], most: int) -> tuple[int, ...] | None:
    """Return the prefixes among whose plans the best one is, or None if there are more than `most`.

    Args:
        graph: the layers.
        free: whether a layer takes nothing, wherever it stands, but for the bytes of its edges.
        most: prefixes.
    """
    alone = {n for n in range(len(graph.layers)) if _sends_nothing(graph, n) and free(n) and not graph.inputs[n]}
    alone = alone if len(alone) < len(graph.layers) else set()
    homes = list(range(len(graph.layers)))
    for number in reversed(graph.order):
        if number not in alone and free(number) and _joins_reader(graph, number):
            homes[number] = homes[graph.readers[number][0].target]
    heads = [number for number in range(len(homes)) if homes[number] == number and number not in alone]
    places = {head: place for place, head in enumerate(heads)}
    groups = [sum(1 << n for n, home in enumerate(homes) if home == head and n not in alone) for head in heads]
    ends = {
        (places[homes[edge.source]], places[homes[edge.target]])
        for edge in graph.edges
        if not {edge.source, edge.target} & alone and homes[edge.source] != homes[edge.target]
    }
    layers = tuple(graph.layers[head] for head in heads)
    small = replace(graph, layers=layers, edges=tuple(LayerEdge(*pair, 0.0) for pair in sorted(ends)))
    found = all_prefixes(small, most)
    if found is None:
        return None
    first = sum(1 << number for number in alone)
    sets = [_union(groups, prefix) | (first if prefix else 0) for prefix in found]
    return tuple(sorted(sets, key=lambda prefix: (prefix.bit_count(), prefix)))


def _union(groups: list[int], prefix: int) -> int:
    """Return the layers of some groups."""
    return sum(group for place, group in enumerate(groups) if prefix >> place & 1)


def _sends_nothing(graph: LayerGraph, number: int) -> bool:
    """Return whether no edge that leaves a layer carries bytes, those of shards included."""
    return all(max(_bytes_at(graph, edge)) == 0 for edge in graph.readers[number])


def _joins_reader(graph: LayerGraph, number: int) -> bool:
    """Return whether a layer has one reader, and both of its sides carry no more bytes if they are in one stage."""
    if len(graph.readers[number]) != 1:
        return False
    (leaving,) = graph.readers[number]
    if not graph.layers[leaving.target].tensor_degrees <= graph.layers[number].tensor_degrees:
        return False
    read = sum(max(_bytes_at(graph, edge)) for edge in graph.inputs[number])
    return read <= leaving.bytes


def _bytes_at(graph: LayerGraph, edge: LayerEdge) -> tuple[float, ...]:
    """Return the bytes that an edge between two stages may cost at either end, with every way to execute its layers."""
    sent = (way.sync_out.get(edge.target, 0.0) for way in graph.layers[edge.source].ways)
    gathered = (way.sync_in.get(edge.source, 0.0) for way in graph.layers[edge.target].ways)
    return tuple(edge.bytes + size for size in (*sent, *gathered))
