"""The cost function of Mist's planner (Zhu et al., EuroSys 2025, arXiv 2503.19050), for two memory optimizations.

All of d stages have w replicas, so each pipeline has m = N / w microbatches of a batch. Stage i takes T_i per
microbatch: its layers, some of which may be recomputed, and its messages, which are not overlapped. D_i is what its
last microbatch takes besides: the ring that adds up gradients, and the update. A batch takes

    (m - 1) max T_i  +  sum T_i  +  max over i of (D_i - sum of T_j before i).

A device of stage i holds weights and gradients, the optimizer's state, and min(d - i, m) microbatches. If the state is
sharded over the replicas it takes 1 / w of that and of the update, and weights are gathered after it, which takes as
long as half of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.plan.profile.layer_graph import GraphLayer, Way
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.piper_cost import way_named
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating
from penstock.plan.stages.two_bw_cost import bandwidths

ADAM = 2.0  # copies of the parameters that an optimizer holds, where the profile does not say


@dataclass(frozen=True)
class KnobbedStage:
    """What a stage takes with its memory optimizations.

    Attributes:
        steady: T, seconds per microbatch.
        extra: D, seconds per batch.
        memory: bytes of a device.
    """

    steady: float
    extra: float
    memory: float


def batch_seconds(stages: Sequence[KnobbedStage], microbatches: int) -> float:
    """Return the seconds of a batch."""
    steady = [stage.steady for stage in stages]
    ends = [stage.extra - sum(steady[:at]) for at, stage in enumerate(stages)]
    return (microbatches - 1) * max(steady) + sum(steady) + max(ends)


def state_bytes(layers: Sequence[GraphLayer]) -> float:
    """Return the bytes of what the optimizer remembers of some layers."""
    return sum(ADAM * layer.parameters if layer.optimizer is None else layer.optimizer for layer in layers)


class MistCost(GraphCost):
    """Rates plans whose stages all have the same number of replicas. Of links up to two speeds count."""

    name = "mist"

    def stage(self, ways: dict[int, Way], edges: float, place: tuple[int, int, int], sharded: bool) -> KnobbedStage:
        """Return what a stage takes.

        Args:
            ways: of its layers, by their numbers.
            edges: bytes of the edges between it and other stages.
            place: its number, the depth and the width.
            sharded: whether optimizer states are.
        """
        at, depth, width = place
        across, along = bandwidths(self.devices, width, depth)
        layers = [self.graph.layers[number] for number in ways]
        parameters = sum(layer.parameters for layer in layers)
        state = state_bytes(layers)
        part = 1 / width if sharded else 1.0
        ring = 2 * (width - 1) / width * parameters / across
        extra = ring * (1.5 if sharded else 1.0) + part * sum(layer.step for layer in layers)
        extra += self.devices.update * any(layer.has_update for layer in layers)
        flight = min(depth - at, self.microbatches // width)
        held = sum(way.memory + flight * way.memory_per_microbatch for way in ways.values())
        steady = sum(way.seconds for way in ways.values()) + 2 * edges / along
        return KnobbedStage(steady, extra, held + part * state)

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs, per microbatch of all pipelines together."""
        width, depth = stages[0].replicas, len(stages)
        if any((stage.replicas, stage.tensor, stage.inner) != (width, 1, ()) for stage in stages):
            return self.refused("its stages are not replicated alike on single devices")
        faults, found, ratings = list[str](), list[KnobbedStage](), list[StageRating]()
        if self.microbatches % width:
            faults.append(f"{self.microbatches} microbatches cannot be divided over {width} pipelines")
        homes = {number: at for at, stage in enumerate(stages) for number in stage.layers}
        for at, stage in enumerate(stages):
            names = stage.ways or ("",) * len(stage.layers)
            ways = {n: way_named(self.graph, n, 1, name) for n, name in zip(stage.layers, names, strict=True)}
            edges = sum(e.bytes for e in self.graph.edges if (homes[e.source] == at) != (homes[e.target] == at))
            knobbed = self.stage(ways, edges, (at, depth, width), stage.sharded)
            found.append(knobbed)
            links = 2 * edges / bandwidths(self.devices, width, depth)[1]
            parts = {
                "compute": (knobbed.steady - links) / width,
                "links": links / width,
                "gradient sums": knobbed.extra / self.microbatches,
            }
            ratings.append(StageRating(knobbed.steady / width + parts["gradient sums"], parts, knobbed.memory))
        m = self.microbatches
        return self.rating(ratings, width * depth, lambda: batch_seconds(found, m // width) / m, faults)
