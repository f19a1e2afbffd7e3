"""The closed form of PipeDream-2BW's planner (Narayanan et al., ICML 2021, App. A.1).

Depth d, width w, microbatches of b samples, N microbatches per batch, so m = N / w for each pipeline. A microbatch
takes max over stages of max(compute + links, sums / m): links are the stage's edges to others, twice, over the
bandwidth between stages, and are not overlapped; sums are the ring's 2 (w - 1) / w P bytes over the bandwidth between
replicas, and are.
Memory: two versions of the weights, and the activations of d microbatches, or with recompute their inputs and the
activations of one. Bandwidths: replicas of a stage stand side by side, so they use the innermost level if w is less
than its units, and stages do if all w d fit into it; other traffic uses the slowest level. That is as published: plans
that are simulated know both orders of ranks, and all levels (`penstock.plan.cluster.rank_links`).
"""

from __future__ import annotations

from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.piper_cost import way_named
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating


def bandwidths(devices: Devices, width: int, depth: int) -> tuple[float, float]:
    """Return the bandwidth between replicas and the one between stages."""
    inner, slow = devices.levels[0], devices.bandwidth
    if len(devices.levels) == 1:
        return slow, slow
    return (
        inner.bandwidth if width < inner.units else slow,
        inner.bandwidth if width * depth <= inner.units else slow,
    )


class TwoBwCost(GraphCost):
    """Rates plans whose stages all have the same number of replicas. Of links up to two speeds count."""

    name = "2bw-paper"

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs, per microbatch of all pipelines together."""
        width, depth = stages[0].replicas, len(stages)
        faults = []
        if any((stage.replicas, stage.tensor, stage.inner) != (width, 1, ()) for stage in stages):
            return self.refused("its stages are not replicated alike on single devices")
        if self.microbatches % width or self.microbatches // width < depth:
            faults.append(f"{self.microbatches} microbatches are not m >= {depth} for each of {width} pipelines")
        homes = {number: at for at, stage in enumerate(stages) for number in stage.layers}
        found = [self._stage(stage, homes, width, depth) for stage in stages]
        return self.rating(found, width * depth, lambda: max(rating.seconds for rating in found), faults)

    def _stage(self, stage: PlannedStage, homes: dict[int, int], width: int, depth: int) -> StageRating:
        """Return what one stage costs."""
        own = homes[stage.layers[0]]
        names = stage.ways or ("",) * len(stage.layers)
        ways = [way_named(self.graph, number, 1, name) for number, name in zip(stage.layers, names, strict=True)]
        edges = sum(
            edge.bytes
            for number in stage.layers
            for edge, end in (
                *((edge, edge.source) for edge in self.graph.inputs[number]),
                *((edge, edge.target) for edge in self.graph.readers[number]),
            )
            if homes[end] != own
        )
        across, along = bandwidths(self.devices, width, depth)
        parameters = sum(way.parameters for way in ways)
        parts = {
            "compute": sum(way.seconds for way in ways) / width,
            "links": 2 * edges / along / width,
            "gradient sums": 2 * (width - 1) / width * parameters / across / self.microbatches,
        }
        memory = sum(way.memory + depth * way.memory_per_microbatch for way in ways)
        return StageRating(max(parts["compute"] + parts["links"], parts["gradient sums"]), parts, memory)
