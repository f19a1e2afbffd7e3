"""Prefixes: sets of layers that hold every layer their members read. A stage is the difference of two.

A set is an int with a bit for each layer. Families of sets ascend by size, from the empty set to that of all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.plan.profile.layer_graph import LayerEdge, LayerGraph

Words = npt.NDArray[np.uint64]


def all_prefixes(graph: LayerGraph, most: int) -> tuple[int, ...] | None:
    """Return every prefix of a graph, or None if there are more than `most`; branches multiply their number."""
    needs = [sum(1 << edge.source for edge in edges) for edges in graph.inputs]
    after = [sum(1 << edge.target for edge in edges) for edges in graph.readers]
    ready = sum(1 << number for number, need in enumerate(needs) if not need)
    found, level = [0], {0: ready}
    while level:
        following: dict[int, int] = {}
        for prefix, addable in level.items():
            for number in bits(addable):
                larger = prefix | 1 << number
                if larger in following:
                    continue
                grown = addable & ~(1 << number)
                for other in bits(after[number]):
                    if needs[other] & ~larger == 0:
                        grown |= 1 << other
                following[larger] = grown
                if len(found) + len(following) > most:
                    return None
        found += following
        level = following
    return tuple(found)


def ordered_prefixes(graph: LayerGraph) -> tuple[int, ...]:
    """Return the prefixes along one topological order: as many as layers, however many branches there are."""
    found = [0]
    for number in graph.order:
        found.append(found[-1] | 1 << number)
    return tuple(found)


def frontier_prefixes(graph: LayerGraph, most: int) -> tuple[int, ...] | None:
    """Return the prefixes that PipeDream's planner knows, or None if there are more than `most`.

    It begins with the first layer that reads nothing and goes on to whatever reads a layer of the set, together with
    all that this layer needs; so a branch that begins with another input is taken as a whole, with the layer that
    joins it. What cannot be reached so, since it reads another input only, is added in topological order.
    """
    closure = [0] * len(graph.layers)
    for number in graph.order:
        closure[number] = 1 << number
        for edge in graph.inputs[number]:
            closure[number] |= closure[edge.source]
    after = [sum(1 << edge.target for edge in edges) for edges in graph.readers]
    first = next(number for number, edges in enumerate(graph.inputs) if not edges)
    found, waiting = {1 << first}, [1 << first]
    while waiting:
        prefix = waiting.pop()
        frontier = 0
        for number in bits(prefix):
            frontier |= after[number]
        for number in bits(frontier & ~prefix):
            larger = prefix | closure[number]
            if larger not in found:
                found.add(larger)
                waiting.append(larger)
                if len(found) > most:
                    return None
    last = max(found, key=int.bit_count)
    for number in graph.order:
        last |= 1 << number
        found.add(last)
    return tuple(sorted(found | {0}, key=lambda prefix: (prefix.bit_count(), prefix)))


def fewer_prefixes(graph: LayerGraph, most: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return some prefixes of a graph that has too many, and what is to be said of that.

    Those that PipeDream's planner knows if they are no more than `most`, otherwise those along one order.
    """
    sets, note = frontier_prefixes(graph, most), "not every cut was looked at: the graph has too many branches"
    if sets is not None:
        return sets, (note,)
    return ordered_prefixes(graph), (note, "cuts are along one topological order")


def useful_prefixes(graph: LayerGraph, free: Callable[[int], bool], most: int) -> tuple[int, ...] | None:
    """Return the prefixes among whose plans the best one is, or None if there are more than `most`.

    A layer that takes neither time nor memory, and whose one reader receives no fewer bytes from it than it reads, may
    stand in the stage of that reader: no stage of any plan becomes dearer. A source that takes nothing and sends
    nothing may stand in the first stage. With them out of the way, a graph with side inputs has few prefixes.

    Args:
        graph: the layers.
        free: whether a layer takes nothing, wherever it stands, but for the bytes of its edges.
        most: prefixes.
    """
    sends = [any(max(_bytes_at(graph, edge)) for edge in edges) for edges in graph.readers]
    alone = {n for n, edges in enumerate(graph.inputs) if not (edges or sends[n]) and free(n)}
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
    sets = [
        sum(group for place, group in enumerate(groups) if prefix >> place & 1) | (first if prefix else 0)
        for prefix in found
    ]
    return tuple(sorted(sets, key=lambda prefix: (prefix.bit_count(), prefix)))


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


def bits(number: int) -> list[int]:
    """Return the layers of a set, ascending."""
    found = []
    while number:
        low = number & -number
        found.append(low.bit_length() - 1)
        number ^= low
    return found


class PrefixFamily:
    """A family of prefixes as arrays.

    Attributes:
        sets: the prefixes, ascending by size; the first is empty and the last holds all layers.
        members: whether a prefix (row) holds a layer (column).
    """

    def __init__(self, sets: tuple[int, ...], layers: int) -> None:
        self.sets = sets
        width = (layers + 63) // 64
        raw = b"".join(prefix.to_bytes(8 * width, "little") for prefix in sets)
        self._words: Words = np.frombuffer(raw, dtype="<u8").reshape(len(sets), width).astype(np.uint64)
        bytes_ = np.frombuffer(raw, dtype=np.uint8).reshape(len(sets), 8 * width)
        self.members: npt.NDArray[np.bool_] = np.unpackbits(bytes_, axis=1, bitorder="little")[:, :layers].astype(bool)

    def __len__(self) -> int:
        return len(self.sets)

    def below(self, at: int) -> npt.NDArray[np.intp]:
        """Return the indices of the sets that the one at `at` truly contains, ascending."""
        outside = self._words[:at] & ~self._words[at]
        return np.flatnonzero(~outside.any(axis=1))

    def stage(self, before: int, after: int) -> tuple[int, ...]:
        """Return the layers of the stage between two sets, given as indices."""
        return tuple(bits(self.sets[after] & ~self.sets[before]))
