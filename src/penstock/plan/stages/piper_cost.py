"""The cost function of Piper (Tarnawski et al., NeurIPS 2021, sec. 3), as its authors released it (`algo.cpp`).

A plan is as slow as its busiest device, per microbatch ("sample"). A stage with data degree d and tensor degree t
takes compute / d, plus the bytes of its edges to other stages, twice (activation and gradient), with what the shards
gather and scatter for them, over d B, plus 4 (d - 1) P / (d N B) to add up P bytes of parameters once in N
microbatches. A device holds `memory` of all layers, and `memory_per_microbatch` of ceil(s / d) microbatches, where s
adds up the data degrees of this stage and those behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checks import check_whole, did_you_mean
from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating


@dataclass(frozen=True)
class PiperCost(GraphCost):
    """Rates plans of a graph. Of links the slowest level counts, as Piper knows one bandwidth."""

    name = "piper"

    def __post_init__(self) -> None:
        """Refuse what is no number of microbatches.

        Raises:
            ConfigError: it is not.
        """
        check_whole("microbatches", self.microbatches, 1, 1 << 20)

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs; replicas whose number does not divide N do not fit."""
        homes = {number: at for at, stage in enumerate(stages) for number in stage.layers}
        ratings, faults = [], list[str]()
        ahead = sum(stage.replicas for stage in stages)
        if ahead > self.microbatches:
            faults.append(f"its data degrees add up to {ahead}, more than {self.microbatches} microbatches")
        for at, stage in enumerate(stages):
            if self.microbatches % stage.replicas:
                faults.append(f"stage {at}: {stage.replicas} replicas do not divide {self.microbatches} microbatches")
            in_flight = -(-ahead // stage.replicas)
            ahead -= stage.replicas
            ratings.append(self._stage(stage, at, homes, in_flight))
        used = sum(stage.devices for stage in stages)
        return self.rating(ratings, used, lambda: max(rating.seconds for rating in ratings), faults)

    def _stage(self, stage: PlannedStage, at: int, homes: dict[int, int], in_flight: int) -> StageRating:
        """Return what one stage costs, with so many microbatches in flight."""
        compute = edges = parameters = memory = 0.0
        names = stage.ways or ("",) * len(stage.layers)
        for number, name in zip(stage.layers, names, strict=True):
            way = way_named(self.graph, number, stage.tensor, name)
            compute += way.seconds
            parameters += way.parameters
            memory += way.memory + in_flight * way.memory_per_microbatch
            for edge in self.graph.inputs[number]:
                if homes[edge.source] != at:
                    edges += 2 * (edge.bytes + way.sync_in.get(edge.source, 0.0))
            for edge in self.graph.readers[number]:
                if homes[edge.target] != at:
                    edges += 2 * (edge.bytes + way.sync_out.get(edge.target, 0.0))
        d, bandwidth = stage.replicas, self.devices.bandwidth
        parts = {
            "compute": compute / d,
            "links": edges / d / bandwidth,
            "gradient sums": 4 * (d - 1) * parameters / d / self.microbatches / bandwidth,
        }
        return StageRating(sum(parts.values()), parts, memory)


def way_named(graph: LayerGraph, number: int, tensor: int, name: str) -> Way:
    """Return a way to execute a layer; the first one with the tensor degree if no name is given.

    Raises:
        ConfigError: it has no such way.
    """
    ways = [way for way in graph.layers[number].ways if way.tensor == tensor]
    for way in ways:
        if name in ("", way.name):
            return way
    where = f"layer {graph.layers[number].name!r}"
    if not ways:
        raise ConfigError(f"{where} has no option with tensor degree {tensor}")
    raise ConfigError(f"{where} has no option {name!r}.{did_you_mean(name, [way.name for way in ways])}")
