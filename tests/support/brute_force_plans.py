"""Every plan of a small graph, one by one, rated from the formulas of the papers: for the planners to be compared with.

It shares nothing with the planners but the graph: layers with numbers, and edges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from penstock.plan.profile.layer_graph import LayerGraph, Way, layer_graph
from penstock.plan.profile.schema import LayerInput, LayerOption, Profile, ProfiledLayer
from penstock.plan.stages.planned import PlannedStage

Stages = tuple[frozenset[int], ...]


class TrialStage(NamedTuple):
    """A stage with its degrees and the ways of its layers."""

    layers: frozenset[int]
    data: int
    tensor: int = 1
    ways: tuple[Way, ...] = ()


def divisions(graph: LayerGraph, most: int) -> Iterator[Stages]:
    """Every sequence of at most so many stages of which none reads a later one."""
    reads = {n: {edge.source for edge in graph.edges if edge.target == n} for n in range(len(graph.layers))}

    def extended(done: frozenset[int], stages: Stages) -> Iterator[Stages]:
        left = sorted(set(reads) - done)
        if not left:
            yield stages
        elif len(stages) < most:
            for count in range(1, len(left) + 1):
                for chosen in map(frozenset, itertools.combinations(left, count)):
                    if all(reads[n] <= done | chosen for n in chosen):
                        yield from extended(done | chosen, (*stages, chosen))

    yield from extended(frozenset(), ())


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a sum of so many, all at least 1."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def pipedream_time(graph: LayerGraph, layers: frozenset[int], levels: list[tuple[int, float]]) -> float:
    """The least time of a pipeline for some layers on all units of the last level, without a limit of memory."""
    if not levels:
        return sum(graph.layers[n].seconds for n in layers)
    units, bandwidth = levels[-1]
    below = levels[-2][0] if len(levels) > 1 else 1
    inside = [edge for edge in graph.edges if {edge.source, edge.target} <= layers]
    places = sorted(layers)
    small = LayerGraph(
        "",
        tuple(graph.layers[n] for n in places),
        tuple(e._replace(source=places.index(e.source), target=places.index(e.target)) for e in inside),
    )
    best = math.inf
    known: dict[frozenset[int], float] = {}
    for stages in divisions(small, units):
        for stage in stages:
            if stage not in known:
                known[stage] = pipedream_time(small, stage, levels[:-1])
        for replicas in shares(units, len(stages)):
            slowest = 0.0
            for at, (stage, r) in enumerate(zip(stages, replicas, strict=True)):
                parameters = sum(small.layers[n].parameters for n in stage)
                sums = 4 * (r - 1) * parameters / (bandwidth * r) / (below if at == 0 else 1)
                slowest = max(slowest, (known[stage] + sums) / r)
            best = min(best, slowest)
    return best


def piper_time(graph: LayerGraph, stages: list[TrialStage], bandwidth: float, batch: int, memory: float) -> float:
    """The time of a plan by Piper's cost function; infinite if it does not fit."""
    slowest, ahead = 0.0, sum(stage.data for stage in stages)
    for stage in stages:
        y = math.ceil(ahead / stage.data)
        ahead -= stage.data
        slowest = max(slowest, _piper_stage(graph, stage, bandwidth, batch, memory, y))
    return slowest


def _piper_stage(graph: LayerGraph, stage: TrialStage, bandwidth: float, batch: int, memory: float, y: int) -> float:
    ways = dict(zip(sorted(stage.layers), stage.ways, strict=True))
    if sum(way.memory + y * way.memory_per_microbatch for way in ways.values()) > memory:
        return math.inf
    traffic = 0.0
    for edge in graph.edges:
        if edge.target in ways and edge.source not in ways:
            traffic += 2 * (edge.bytes + ways[edge.target].sync_in.get(edge.source, 0.0))
        if edge.source in ways and edge.target not in ways:
            traffic += 2 * (edge.bytes + ways[edge.source].sync_out.get(edge.target, 0.0))
    sums = sum(4 * (stage.data - 1) * way.parameters / stage.data / batch for way in ways.values())
    return (traffic / stage.data + sums) / bandwidth + sum(way.seconds for way in ways.values()) / stage.data


def memory_of(stages: list[TrialStage]) -> list[float]:
    """The bytes of a device of each stage, by Piper's cost function."""
    found = []
    for at, stage in enumerate(stages):
        y = math.ceil(sum(each.data for each in stages[at:]) / stage.data)
        found.append(sum(way.memory + y * way.memory_per_microbatch for way in stage.ways))
    return found


def best_by_piper(graph: LayerGraph, devices: int, bandwidth: float, batch: int, memory: float) -> float:
    """The least time of all plans by Piper's cost function."""
    degrees = [
        (d, t)
        for d in range(1, devices + 1)
        for t in range(1, devices // d + 1)
        if batch % d == 0 and any(way.tensor == t for layer in graph.layers for way in layer.ways)
    ]
    known: dict[Any, float] = {}

    def stage_time(layers: frozenset[int], d: int, t: int, y: int) -> float:
        key = layers, d, t, y
        if key not in known:
            choices = [[way for way in graph.layers[n].ways if way.tensor == t] for n in sorted(layers)]
            known[key] = min(
                (
                    _piper_stage(graph, TrialStage(layers, d, t, ways), bandwidth, batch, memory, y)
                    for ways in itertools.product(*choices)
                ),
                default=math.inf,
            )
        return known[key]

    best = math.inf
    for stages in divisions(graph, devices):
        for chosen in itertools.product(degrees, repeat=len(stages)):
            total = sum(d for d, _ in chosen)
            if sum(d * t for d, t in chosen) > devices or total > batch:
                continue
            slowest, ahead = 0.0, total
            for layers, (d, t) in zip(stages, chosen, strict=True):
                slowest = max(slowest, stage_time(layers, d, t, math.ceil(ahead / d)))
                ahead -= d
                if slowest >= best:
                    break
            best = min(best, slowest)
    return best


def best_by_two_bw(graph: LayerGraph, devices: int, bandwidth: float, batch: int, memory: float) -> float:
    """The least time of all plans by 2BW's closed form, stages of any size, recompute chosen for each stage."""
    best = math.inf
    for stages in divisions(graph, devices):
        for width in range(1, devices // len(stages) + 1):
            if batch % width or batch // width < len(stages):
                continue
            times = [_two_bw_stage(graph, layers, width, len(stages), bandwidth, batch, memory) for layers in stages]
            best = min(best, max(times))
    return best


def _two_bw_stage(
    graph: LayerGraph, layers: frozenset[int], width: int, depth: int, bandwidth: float, batch: int, memory: float
) -> float:
    traffic = sum(2 * edge.bytes for edge in graph.edges if (edge.source in layers) != (edge.target in layers))
    best = math.inf
    for again in (False, True):
        ways = []
        for n in layers:
            alone = [way for way in graph.layers[n].ways if way.tensor == 1]
            ways.append(([way for way in alone if ("recomp" in way.name) == again] or alone)[0])
        if sum(way.memory + depth * way.memory_per_microbatch for way in ways) <= memory:
            sums = 2 * (width - 1) / width * sum(way.parameters for way in ways) / bandwidth / (batch / width)
            time = max(sum(way.seconds for way in ways) + traffic / bandwidth, sums)
            best = min(best, time / width)
    return best


def trial_of(graph: LayerGraph, stages: tuple[PlannedStage, ...]) -> list[TrialStage]:
    """A plan as trial stages."""
    return [
        TrialStage(
            frozenset(stage.layers),
            stage.replicas,
            stage.tensor,
            tuple(
                next(w for w in graph.layers[n].ways if (w.tensor, w.name) == (stage.tensor, name))
                for n, name in sorted(zip(stage.layers, stage.ways, strict=True))
            ),
        )
        for stage in stages
    ]


def small_graph(random: Random, layers: int, sources: bool = False, ways: bool = False) -> LayerGraph:
    """A random graph of so many layers: a chain, more or less.

    Args:
        random: where numbers come from; zeros and equal numbers are among them.
        layers: how many.
        sources: whether several layers may read nothing.
        ways: whether layers have options with tensor degrees, recompute, and bytes of shards.
    """
    return layer_graph(small_profile(random, layers, sources, ways))


def small_profile(random: Random, layers: int, sources: bool = False, ways: bool = False) -> Profile:
    """The profile of such a graph."""
    found = []
    for at in range(layers):
        count = 0 if at == 0 or (sources and random.random() < 0.2) else 1 + (random.random() < 0.3)
        reads = sorted({max(0, at - 1 - int(random.expovariate(1.5))) for _ in range(count)})
        name = f"n{at}"
        inputs: list[Any] = [LayerInput(layer=f"n{r}", bytes=float(random.randint(0, 9))) for r in reads]
        found.append(
            ProfiledLayer(
                name=name,
                kind=random.choice(["block", "block", "other"]),
                inputs=inputs,
                forward=float(random.randint(0, 5)),
                backward=float(random.randint(0, 9)),
                output=float(random.randint(0, 9)),
                stored=float(random.randint(0, 30)),
                parameters=float(random.choice([0, random.randint(0, 40)])),
                options=_options(random, [f"n{r}" for r in reads]) if ways else [],
            )
        )
    return Profile(format="penstock profile 1", layers=found)


def _options(random: Random, reads: list[str]) -> list[LayerOption]:
    """Options of one layer; some layers have a third way or parameters that differ from way to way."""
    found = []
    seconds, memory = random.randint(1, 20), random.randint(0, 20)
    parameters = float(random.randint(0, 30))
    for tensor in (1, 2, 4) if random.random() < 0.5 else (1, 2) if random.random() < 0.5 else (1,):
        for name in ("plain", "recompute", "offload")[: random.choice([1, 2, 2, 2, 2, 3])]:
            dearer = 0 if name == "plain" else random.randint(0, 6)
            found.append(
                LayerOption(
                    name=name,
                    tensor=tensor,
                    seconds=seconds / tensor + dearer,
                    parameters=parameters / tensor if random.random() < 0.9 else float(random.randint(0, 30)),
                    memory=float(memory // tensor + (0 if name == "plain" else random.randint(0, 4))),
                    memory_per_microbatch=float(random.randint(0, 12 if name == "plain" else 5)),
                    sync_in={r: float(random.randint(0, 5)) for r in reads if tensor > 1},
                )
            )
    return found
