"""PipeDream-2BW's planner: depth, width, microbatch size, and recompute everywhere or nowhere, with equal stages.

Narayanan et al., ICML 2021, sec. 4 and algorithm 1: for every width and depth, the configurations that fit are rated,
and the fastest is kept. Here a class of configurations is skipped when all compute, evenly divided, is no faster than
the best so far. `plan.planners.two_bw_unequal_stages` searches the same widths and depths with the best stages instead
of equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.equal_stages import Division, equal_divisions
from penstock.plan.stages.piper_cost import PiperCost
from penstock.plan.stages.planned import Plan, PlannedStage, Search, Skipped
from penstock.plan.stages.two_bw_cost import TwoBwCost


@dataclass(frozen=True)
class Sized:
    """A graph at a microbatch size, with the microbatches of a batch of that size.

    Attributes:
        graph: the layers.
        samples: of a microbatch; 1 if the profile does not say.
        microbatches: per batch.
    """

    graph: LayerGraph
    samples: int
    microbatches: int


def single_device_ways(graph: LayerGraph, recompute: bool) -> list[Way] | None:
    """Return how each layer runs with recompute everywhere or nowhere; None if some layer needs several devices.

    A way with recompute is one whose name says so; a layer without one has nothing to recompute.
    """
    found = []
    for layer in graph.layers:
        ways = [way for way in layer.ways if way.tensor == 1]
        if not ways:
            return None
        again = [way for way in ways if "recomp" in way.name]
        plain = [way for way in ways if "recomp" not in way.name] or ways
        found.append((again or plain)[0] if recompute else plain[0])
    return found


def plan_as_two_bw(sizes: Mapping[int, Sized], devices: Devices, cost: str = TwoBwCost.name) -> Search:
    """Return the best configuration with equal stages.

    Args:
        sizes: the graph at each microbatch size, by samples.
        devices: not all need be used.
        cost: "2bw-paper", its closed form, or "piper".
    """
    best, least, skipped, closest = None, math.inf, list[Skipped](), ""
    for sized in sizes.values():
        rater = (TwoBwCost if cost == TwoBwCost.name else PiperCost)(sized.graph, devices, sized.microbatches)
        ways = {recompute: single_device_ways(sized.graph, recompute) for recompute in (False, True)}
        if ways[False] is None:
            return Search(None, why="a layer cannot run on a single device, as this planner needs")
        total = sum(min(way.seconds for way in layer.ways if way.tensor == 1) for layer in sized.graph.layers)
        for depth in range(1, min(devices.count, len(sized.graph.layers), sized.microbatches) + 1):
            divisions = equal_divisions(sized.graph, depth)
            for width in widths(devices.count // depth, depth, sized.microbatches) if divisions else ():
                bound = total / (depth * width) / sized.samples
                if bound >= least:
                    skipped.append(bounded(sized, depth, width, bound, least))
                    continue
                for stages in _configurations(divisions, width, ways):
                    rating = rater.rate(stages)
                    closest = closest or rating.fault
                    if rating.seconds / sized.samples < least:
                        best = Plan(TwoBwCost.name, stages, rating, samples=sized.samples)
                        least = best.seconds_per_sample
    why = (
        ""
        if best
        else f"no plan fits: no configuration with equal stages fits; the first one: {closest or 'no division exists'}"
    )
    return Search(best, tuple(skipped), why)


def widths(most: int, depth: int, microbatches: int) -> Iterator[int]:
    """Return the widths that divide the microbatches and leave each pipeline as many as it is deep."""
    return (w for w in range(1, most + 1) if microbatches % w == 0 and microbatches // w >= depth)


def bounded(sized: Sized, depth: int, width: int, bound: float, best: float) -> Skipped:
    """Return a class that was skipped, with its bound."""
    return Skipped(
        f"depth {depth}, width {width}" + (f", microbatch {sized.samples}" if sized.samples > 1 else ""),
        f"compute alone takes {bound:.4g} s per sample, the best plan so far {best:.4g}",
    )


def _configurations(
    divisions: list[Division], width: int, ways: dict[bool, list[Way] | None]
) -> Iterator[tuple[PlannedStage, ...]]:
    """Return the plans of a depth and width: every equal division, without recompute and with."""
    for division in divisions:
        for chosen in ways.values():
            if chosen is not None:
                yield tuple(
                    PlannedStage(layers, width, 1, tuple(chosen[n].name for n in layers)) for layers in division
                )
