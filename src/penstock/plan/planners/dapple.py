"""DAPPLE's planner (Fan et al., arXiv 2007.01045, sec. 4): stages with replicas of their own, for a synchronous batch.

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

As published, for each number of stages a dynamic program over (layers, devices) finds the cut whose slowest stage, or
message, is fastest, on all devices; the latency decides among the numbers of stages. It is not exact, since the latency
is not the slowest stage. `plan_for_dapple_cost` tries every plan if they are few, and otherwise goes on from the
published answers, and those on fewer devices, as long as moving a layer or a device to another stage helps.

Layers are cut along one topological order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, bandwidth_among, held
from penstock.plan.stages.layer_row import (
    CutProgram,
    Floats,
    State,
    between,
    border_bytes,
    later,
    near_cuts,
    row_notes,
    row_stages,
    running_sums,
)
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating

_MOST_PLANS = 20_000  # that are all tried
_MOST_WORK = 2e9  # cells of the dynamic program


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
    found, strictly_between = len(blocks) - 1, 0.0
    for at in range(len(blocks) - 2, -1, -1):
        own = blocks[at].forward + blocks[at].backward
        steady = blocks[found].forward + blocks[found].backward
        if (microbatches - 1) * own > (microbatches - 1) * steady + strictly_between:
            found, strictly_between = at, 0.0
        else:
            strictly_between += own
    return found


def latency(blocks: Sequence[Block], microbatches: int) -> float:
    """Return L, the seconds of a batch."""
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


class ReplicatedStage(NamedTuple):
    """A stage on devices that follow those of the stage before.

    Attributes:
        forward, both: seconds of a microbatch on one device, without and with its backward.
        hop: seconds of the messages of a microbatch over the border before it, one way.
        ring: seconds of the sum of its gradients.
    """

    forward: float
    both: float
    hop: float
    ring: float


class ReplicatedCost(GraphCost):
    """A cost of stages with replicas of their own on single devices, which follow each other, stage after stage."""

    def among(self, group: range) -> float:
        """Return the bandwidth of a ring of devices."""
        return bandwidth_among(self.devices, group.start, group.stop)

    def toward(self, group: range, following: range) -> float:
        """Return the bandwidth from devices to those that follow them."""
        return bandwidth_among(self.devices, group.start, following.stop)

    def replicated(self, stages: tuple[PlannedStage, ...]) -> Iterator[ReplicatedStage]:
        """Yield what each stage takes.

        Raises:
            ConfigError: the profile does not tell forward and backward apart.
        """
        check_halves(self.graph)
        before = range(0)
        for size, stage in zip(self.border_bytes(stages), stages, strict=False):
            layers, count = [self.graph.layers[number] for number in stage.layers], stage.replicas
            group = range(before.stop, before.stop + count)
            parameters = sum(layer.parameters for layer in layers)
            yield ReplicatedStage(
                sum(layer.forward or 0.0 for layer in layers),
                sum(layer.seconds for layer in layers),
                size / (self.toward(before, group) * count) if before else 0.0,
                2 * (count - 1) / count * parameters / self.among(group),
            )
            before = group


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


class DappleCost(ReplicatedCost):
    """Rates plans by the latency of a batch over M. Of links the first two speeds count."""

    name = "dapple"

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return self.refused("its stages are not replicated on single devices")
        blocks, ratings = list[Block](), list[StageRating]()
        for at, (stage, (forward, both, hop, ring)) in enumerate(zip(stages, self.replicated(stages), strict=True)):
            if at:
                blocks.append(Block(hop, hop))
            own = Block(forward / stage.replicas, (both - forward) / stage.replicas, ring)
            blocks.append(own)
            parts = {"compute": own.forward + own.backward, "links": 2 * hop, "gradient sums": ring / self.microbatches}
            ways = [self.graph.layers[number].ways[0] for number in stage.layers]
            memory = held(ways, min(len(stages) - at, self.microbatches))
            ratings.append(StageRating(max(parts["compute"], 2 * hop) + parts["gradient sums"], parts, memory))
        used = sum(stage.replicas for stage in stages)
        return self.rating(ratings, used, lambda: latency(blocks, self.microbatches) / self.microbatches)


def plan_as_dapple(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the plan of the published search, on all devices.

    Raises:
        ConfigError: the profile does not tell forward and backward apart, or the search would be too large.
    """
    return best_replicated(_fitting(DappleSearch(graph, devices, microbatches).balanced([devices.count])))


def plan_for_dapple_cost(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the least latency that is found; the least that there is for small graphs.

    Raises:
        ConfigError: as `plan_as_dapple`.
    """
    search = DappleSearch(graph, devices, microbatches)
    if search.count() <= _MOST_PLANS:
        return best_replicated(search.all())
    started = _fitting(search.balanced(range(1, devices.count + 1)))
    if not started:
        return best_replicated([])
    best = search.improved(min(started, key=_seconds))
    note = "the best that was found, not proven to be the best there is"
    return best_replicated([replace(best, notes=(*best.notes, note))])


def best_replicated(plans: Iterable[Plan]) -> Search:
    """Return the fastest of some plans, the first of those that are equally fast."""
    best = min(plans, key=_seconds, default=None)
    if best is None or math.isinf(_seconds(best)):
        return Search(None, why=f"no plan fits: {best.rating.fault if best else 'no division into stages fits'}")
    uneven = len({stage.replicas for stage in best.stages}) > 1
    note = "stages with different numbers of replicas are computed here; Pipeline cannot run them"
    return Search(replace(best, notes=(*best.notes, note)) if uneven else best)


def _seconds(plan: Plan) -> float:
    return plan.rating.seconds


def _fitting(plans: Iterable[Plan]) -> list[Plan]:
    return [plan for plan in plans if math.isfinite(_seconds(plan))]


class DappleSearch:
    """Plans of a graph along one topological order."""

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        check_halves(graph)
        self._cost = DappleCost(graph, devices, microbatches)
        self._graph, self._layers, self._devices = graph, len(graph.layers), devices.count

    def plan(self, cuts: Sequence[int], replicas: Sequence[int]) -> Plan:
        stages = row_stages(self._graph, cuts, replicas)
        return Plan(DappleCost.name, stages, self._cost.rate(stages), row_notes(self._graph))

    def count(self) -> int:
        if self._devices > 64:
            return _MOST_PLANS + 1
        depths = range(1, min(self._layers, self._devices) + 1)
        return sum(math.comb(self._layers - 1, s - 1) * math.comb(self._devices, s) for s in depths)

    def all(self) -> Iterator[Plan]:
        """Yield every plan, also those that do not fit."""
        for stages in range(1, min(self._layers, self._devices) + 1):
            for inner in combinations(range(1, self._layers), stages - 1):
                for ends in combinations(range(1, self._devices + 1), stages):
                    replicas = [after - before for before, after in pairwise((0, *ends))]
                    yield self.plan((0, *inner, self._layers), replicas)

    def improved(self, plan: Plan) -> Plan:
        """Return the plan after all moves of a layer or a device between two stages that help."""
        while True:
            better = min(self._neighbours(plan), key=_seconds, default=plan)
            if _seconds(better) >= _seconds(plan) * (1 - 1e-12):
                return plan
            plan = better

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plans that differ by one move."""
        cuts = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
        replicas = [stage.replicas for stage in plan.stages]
        for moved in near_cuts(cuts):
            yield self.plan(moved, replicas)
        for giver in range(len(replicas)):
            for taker in range(-1, len(replicas)):  # -1: a device is left unused
                shifted = list(replicas)
                shifted[giver] -= 1
                if taker >= 0:
                    shifted[taker] += 1
                if taker != giver and shifted[giver] > 0:
                    yield self.plan(cuts, shifted)

    def balanced(self, counts: Iterable[int]) -> Iterator[Plan]:
        """Yield, for each number of stages and of devices, the plan whose slowest block is fastest.

        Raises:
            ConfigError: the search would be too large.
        """
        deepest = min(self._layers, self._devices)
        work = float(deepest) * self._devices**2 * (self._layers + 1) ** 2
        if work > _MOST_WORK:
            raise ConfigError(
                f"planner 'dapple' would look at {work:.2g} cells for {self._layers} layers on {self._devices} "
                f"devices, more than {_MOST_WORK:.0e}; merge layers, or plan for fewer devices"
            )
        blocks = self._blocks()
        for stages in range(1, deepest + 1):
            program = CutProgram(self._layers + 1, (0,))
            for left in range(stages, 0, -1):
                fits = self._fits(min(left, self._cost.microbatches))
                program.add_stage(partial(self._moves, np.where(fits, blocks, np.inf)))
            for count in counts:
                if (count,) in program.least and math.isfinite(program.least[count,][-1]):
                    cuts, used = program.trace((count,))
                    yield self.plan(cuts, np.diff([0, *(devices for (devices,) in used)]).tolist())

    def _moves(self, times: Floats, used: State) -> Iterator[tuple[State, Floats]]:
        for count in range(1, self._devices - used[0] + 1):
            yield (used[0] + count,), times[count - 1]

    def _blocks(self) -> Floats:
        """Return the larger one of a stage and of the messages before it: (replicas - 1, first layer, last layer)."""
        compute = between(running_sums(self._graph.layers[n].seconds for n in self._graph.order))
        messages = 2 * border_bytes(self._graph)[:, None] / self._cost.devices.bandwidth
        replicas = np.arange(1, self._devices + 1)[:, None, None]
        return np.where(later(compute), np.maximum(compute, messages) / replicas, np.inf)

    def _fits(self, flight: int) -> npt.NDArray[np.bool_]:
        """Return which stages fit with so many microbatches in flight: (first layer, last layer)."""
        ways = [self._graph.layers[number].ways[0] for number in self._graph.order]
        return np.asarray(between(running_sums(held([way], flight) for way in ways)) <= self._cost.limit)
