"""GraphPipe's view of a plan: stages form a graph, and the way to its end decides what each keeps.

After Jeon et al., "GraphPipe" (arXiv 2406.17145): of stages that may run side by side none waits for another one. So a
stage keeps as many microbatches as there are stages on the longest way from it to an end, not as there are stages after
it in a row, and a batch is filled and drained over the longest way.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating

Number = TypeVar("Number", float, npt.NDArray[np.float64])


class StageWork(NamedTuple, Generic[Number]):
    """What a stage does for each microbatch; or what several do, as arrays.

    Attributes:
        seconds: of compute.
        read: bytes that it reads of other stages.
        parameters: bytes of which it adds up gradients, once per batch.
    """

    seconds: Number
    read: Number
    parameters: Number


class GraphPipeCost(GraphCost):
    """Rates plans whose stages form a graph, with replicas on single devices.

    A stage with r replicas takes, per microbatch, its compute over r, what it reads of other stages and the gradients
    of that over r and the bandwidth, and the sum of its gradients, 2 (r - 1) / r of the parameters, over the bandwidth
    and M. A batch takes M - 1 times the slowest stage and the stages on the slowest way through the graph. Of links
    the slowest level counts.
    """

    name = "graphpipe"

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs, per microbatch: the time of a batch over M."""
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return self.refused("its stages are not replicated on single devices")
        following = self._following(stages)
        order = _topological(following)
        if order is None:
            return self.refused("its stages read each other in a cycle")
        depth = [1] * len(stages)
        for at in reversed(order):
            depth[at] = 1 + max((depth[after] for after in following[at]), default=0)
        ratings = tuple(self._stage(stage, depth[at]) for at, stage in enumerate(stages))
        way = [0.0] * len(stages)
        for at in reversed(order):
            way[at] = ratings[at].seconds + max((way[after] for after in following[at]), default=0.0)
        batch = (self.microbatches - 1) * max(rating.seconds for rating in ratings) + max(way)
        used = sum(stage.replicas for stage in stages)
        return self.rating(ratings, used, lambda: batch / self.microbatches)

    def parts(self, work: StageWork[Number], replicas: int) -> dict[str, Number]:
        """Return the seconds of a stage by cause."""
        bandwidth = self.devices.bandwidth
        return {
            "compute": work.seconds / replicas,
            "links": 2 * work.read / bandwidth / replicas,
            "gradient sums": 2 * (1 - 1 / replicas) * work.parameters / bandwidth / self.microbatches,
        }

    def seconds(self, work: StageWork[Number], replicas: int) -> Number:
        """Return the seconds of a stage."""
        compute, links, sums = self.parts(work, replicas).values()
        return compute + links + sums

    def _stage(self, stage: PlannedStage, depth: int) -> StageRating:
        inside = set(stage.layers)
        layers = [self.graph.layers[number] for number in stage.layers]
        read = sum(edge.bytes for edge in self.graph.edges if edge.target in inside and edge.source not in inside)
        work = StageWork(sum(layer.seconds for layer in layers), read, sum(layer.parameters for layer in layers))
        flight = min(depth, self.microbatches)
        memory = sum(layer.ways[0].memory + flight * layer.ways[0].memory_per_microbatch for layer in layers)
        return StageRating(self.seconds(work, stage.replicas), self.parts(work, stage.replicas), memory)

    def _following(self, stages: tuple[PlannedStage, ...]) -> list[set[int]]:
        """Return for each stage those that read of it."""
        homes = {number: at for at, stage in enumerate(stages) for number in stage.layers}
        found = [set[int]() for _ in stages]
        for edge in self.graph.edges:
            if homes[edge.source] != homes[edge.target]:
                found[homes[edge.source]].add(homes[edge.target])
        return found


def _topological(following: list[set[int]]) -> list[int] | None:
    """Return the stages in topological order; None if there is a cycle."""
    left = [0] * len(following)
    for after in following:
        for stage in after:
            left[stage] += 1
    ready, found = [at for at, count in enumerate(left) if not count], list[int]()
    while ready:
        at = ready.pop()
        found.append(at)
        for stage in following[at]:
            left[stage] -= 1
            if not left[stage]:
                ready.append(stage)
    return found if len(found) == len(following) else None
