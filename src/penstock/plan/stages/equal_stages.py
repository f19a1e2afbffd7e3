"""Stages with equal numbers of blocks, as the planner of PipeDream-2BW forms them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.plan.profile.layer_graph import LayerGraph

Division = tuple[tuple[int, ...], ...]


def equal_divisions(graph: LayerGraph, stages: int) -> list[Division]:
    """Return the ways to divide a graph into stages with equal numbers of blocks, or numbers that differ by one.

    Blocks are the layers of the kind that takes most time, of those with two layers or more, and what stands before and
    after them belongs to the first and the last stage, or to a stage of its own; or all layers are blocks, along a
    topological order. Later stages are the larger ones. A division in which a stage reads a later one is left out.
    """
    found = dict.fromkeys([*_by_blocks(graph, stages), *_by_layers(graph, stages)])
    return [division for division in found if all(division) and _is_pipeline(graph, division)]


def _shares(blocks: tuple[int, ...], stages: int) -> list[tuple[int, ...]]:
    """Divide blocks; the last stages have one more if need be."""
    least, more = divmod(len(blocks), stages)
    found, at = [], 0
    for stage in range(stages):
        count = least + (stage >= stages - more)
        found.append(blocks[at : at + count])
        at += count
    return found


def _by_layers(graph: LayerGraph, stages: int) -> Iterator[Division]:
    """Divide all layers: in the order nearest to the file, and in the one that goes deep first."""
    for order in (graph.order, _depth_first(graph)):
        if stages <= len(order):
            yield tuple(_shares(order, stages))


def _depth_first(graph: LayerGraph) -> tuple[int, ...]:
    """Return the topological order in which the layer that has become ready last comes next."""
    left = [len(edges) for edges in graph.inputs]
    ready = [number for number, count in enumerate(left) if not count]
    found = []
    while ready:
        number = ready.pop()
        found.append(number)
        for edge in graph.readers[number]:
            left[edge.target] -= 1
            if not left[edge.target]:
                ready.append(edge.target)
    return tuple(found)


def _by_blocks(graph: LayerGraph, stages: int) -> Iterator[Division]:
    """Divide the layers of one kind, and give the others to the ends."""
    counts = Counter(layer.kind for layer in graph.layers if layer.kind)
    times = Counter[str]()
    for layer in graph.layers:
        times[layer.kind] += layer.seconds  # type: ignore[assignment]
    kinds = [kind for kind, count in counts.items() if count > 1]
    if not kinds:
        return
    kind = max(kinds, key=lambda each: times[each])
    blocks = tuple(number for number in graph.order if graph.layers[number].kind == kind)
    leading = _ancestors(graph, blocks)
    first = tuple(n for n in graph.order if n in leading and n not in blocks)
    last = tuple(n for n in graph.order if n not in leading and n not in blocks)
    if stages <= len(blocks):
        shares = _shares(blocks, stages)
        shares[0] = (*first, *shares[0])
        shares[-1] = (*shares[-1], *last)
        yield tuple(shares)
    if first and last and 3 <= stages <= len(blocks) + 2:
        yield (first, *_shares(blocks, stages - 2), last)


def _ancestors(graph: LayerGraph, layers: tuple[int, ...]) -> set[int]:
    """Return all layers that these read, directly or not."""
    found, waiting = set[int](), list(layers)
    while waiting:
        for edge in graph.inputs[waiting.pop()]:
            if edge.source not in found:
                found.add(edge.source)
                waiting.append(edge.source)
    return found


def _is_pipeline(graph: LayerGraph, division: Division) -> bool:
    """Return whether no stage reads a later one."""
    homes = {number: at for at, layers in enumerate(division) for number in layers}
    return all(homes[edge.source] <= homes[edge.target] for edge in graph.edges)
