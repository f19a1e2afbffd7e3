"""The cost function of DAPPLE's planner (Fan et al., arXiv 2007.01045, sec. 4): the latency of a synchronous batch.

Stages take F and B seconds for the forward and the backward of a microbatch, which its r replicas share, and AR for the
sum of their gradients, a ring. Between two stages stands one that does nothing but send: bytes over the bandwidth and
the replicas that receive. With a pivot Q a batch of M microbatches takes

    L = sum of F up to Q  +  (M - 1) (F_Q + B_Q)  +  max over s of (AR_s + ending of s),

where the ending of a stage up to Q is the sum of B from it to Q, and of a later one minus the sum of B between them.
The pivot is the last stage at first; going left, s takes its place if (M - 1) (F_s + B_s) exceeds
(M - 1) (F_Q + B_Q) + sum of (F + B) strictly between them. The formula is a lower bound of what eager 1F1B takes.

Replicas stand side by side, stage after stage (the paper's "append first"), so a sum uses the innermost level of links
if its replicas stand in one unit of it, and so does a message between two stages that do. Memory: stage s of p holds
min(p - s, M) microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating


class Block(NamedTuple):
    """A stage, or the messages between two of them, in seconds of a microbatch.

    Attributes:
        forward, backward: of a microbatch.
        reduction: of the gradients, once per batch.
    """

    forward: float
    backward: float
    reduction: float = 0.0


def pivot_of(blocks: Sequence[Block], microbatches: int) -> int:
    """Return the pivot: the block whose work fills the steady state."""
    found, between = len(blocks) - 1, 0.0
    for at in range(len(blocks) - 2, -1, -1):
        own = blocks[at].forward + blocks[at].backward
        steady = blocks[found].forward + blocks[found].backward
        if (microbatches - 1) * own > (microbatches - 1) * steady + between:
            found, between = at, 0.0
        else:
            between += own
    return found


def latency(blocks: Sequence[Block], microbatches: int) -> float:
    """Return the seconds of a batch."""
    pivot = pivot_of(blocks, microbatches)
    begin = sum(block.forward for block in blocks[: pivot + 1])
    steady = (microbatches - 1) * (blocks[pivot].forward + blocks[pivot].backward)
    end, ending = -math.inf, 0.0
    for at in range(pivot, -1, -1):
        ending += blocks[at].backward
        end = max(end, blocks[at].reduction + ending)
    ending = 0.0
    for block in blocks[pivot + 1 :]:
        end = max(end, block.reduction - ending)
        ending += block.backward
    return begin + steady + end


def check_halves(graph: LayerGraph) -> None:
    """Refuse a profile that does not tell forward and backward apart.

    Raises:
        ConfigError: it does not.
    """
    unknown = next((layer.name for layer in graph.layers if layer.forward is None), None)
    if unknown is not None:
        raise ConfigError(
            f"cost 'dapple' needs forward and backward of each layer apart; layer {unknown!r} has options"
        )


class DappleCost(GraphCost):
    """Rates plans of stages with replicas of their own, on single devices. Of links the first two speeds count."""

    name = "dapple"

    def bandwidth(self, first: int, last: int) -> float:
        """Return the bandwidth among the devices from `first` up to `last`, not included."""
        inner = self.devices.levels[0]
        near = first // inner.units == (last - 1) // inner.units
        return inner.bandwidth if near else self.devices.bandwidth

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs, per microbatch: the latency of a batch over M."""
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return self.refused("its stages are not replicated on single devices")
        check_halves(self.graph)
        blocks, ratings = list[Block](), list[StageRating]()
        homes = {number: at for at, stage in enumerate(stages) for number in stage.layers}
        first = 0
        for at, stage in enumerate(stages):
            if at:
                blocks.append(self._messages(homes, at, first - stages[at - 1].replicas, first, stage.replicas))
            blocks.append(self._stage(stage, first))
            first += stage.replicas
            ratings.append(self._rating(blocks, stage, min(len(stages) - at, self.microbatches)))
        return self.rating(ratings, first, lambda: latency(blocks, self.microbatches) / self.microbatches)

    def _stage(self, stage: PlannedStage, first: int) -> Block:
        """Return the times of a stage on the devices from `first` on."""
        layers, count = [self.graph.layers[number] for number in stage.layers], stage.replicas
        forward = sum(layer.forward or 0.0 for layer in layers)
        whole = sum(layer.seconds for layer in layers)
        parameters = sum(layer.parameters for layer in layers)
        sums = 2 * (count - 1) / count * parameters / self.bandwidth(first, first + count)
        return Block(forward / count, (whole - forward) / count, sums)

    def _messages(self, homes: dict[int, int], at: int, before: int, first: int, replicas: int) -> Block:
        """Return the times of what crosses the border before stage `at`; whatever reads further on passes it, too."""
        crossing = sum(edge.bytes for edge in self.graph.edges if homes[edge.source] < at <= homes[edge.target])
        seconds = crossing / (self.bandwidth(before, first + replicas) * replicas)
        return Block(seconds, seconds)

    def _rating(self, blocks: Sequence[Block], stage: PlannedStage, flight: int) -> StageRating:
        """Return what the last stage of these blocks takes and holds."""
        own = blocks[-1]
        links = 0.0 if len(blocks) == 1 else blocks[-2].forward + blocks[-2].backward
        parts = {
            "compute": own.forward + own.backward,
            "links": links,
            "gradient sums": own.reduction / self.microbatches,
        }
        ways = [self.graph.layers[number].ways[0] for number in stage.layers]
        memory = sum(way.memory + flight * way.memory_per_microbatch for way in ways)
        return StageRating(max(parts["compute"], links) + parts["gradient sums"], parts, memory)
