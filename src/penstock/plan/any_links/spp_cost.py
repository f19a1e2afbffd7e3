"""What a synchronous batch takes on devices that any links join: a list schedule, as SPP's (arXiv 2204.10562).

Each stage takes F / r and B / r for a microbatch, which its r replicas share. Whenever a stage is free it runs, of the
passes whose inputs are there, the one with the longest way to the end of its microbatch, and of these the first
microbatch. A message takes its bytes over the slowest link between two groups of replicas, and over as many of these as
receive; messages of one direction follow each other. A stage ends with the ring that adds up its gradients, on the
slowest link of its group. Memory counts the microbatches that this order holds.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from penstock.byte_sizes import human_bytes
from penstock.plan.any_links.device_order import Floats
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.dapple_cost import check_halves
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating

NAME = "spp"


@dataclass(frozen=True)
class ListSchedule:
    """What a list schedule takes.

    Attributes:
        ends: of the last backward of each stage.
        held: microbatches in flight on each stage, at most.
    """

    ends: tuple[float, ...]
    held: tuple[int, ...]


def list_schedule(forward: list[float], backward: list[float], hops: list[float], microbatches: int) -> ListSchedule:
    """Return what M microbatches take.

    Args:
        forward, backward: seconds of each stage.
        hops: seconds of a message between a stage and the next one, in either direction.
        microbatches: M.
    """
    stages = len(forward)
    back = [sum(backward[: at + 1]) + sum(hops[:at]) for at in range(stages)]
    way = [sum(forward[at:]) + sum(hops[at:]) + back[-1] for at in range(stages)]
    ready: list[list[tuple[float, int, int]]] = [[] for _ in range(stages)]  # (-way left, microbatch, is backward)
    for k in range(microbatches):
        heapq.heappush(ready[0], (-way[0], k, 0))
    free = [True] * stages
    sent = {(at, step): 0.0 for at in range(stages) for step in (-1, 1)}
    held, most, ends = [0] * stages, [0] * stages, [0.0] * stages
    events: list[tuple[float, int, int, int, int]] = []  # (time, kind, stage, microbatch, is backward)
    now = 0.0
    while True:
        for at in range(stages):
            if free[at] and ready[at]:
                _, k, is_back = heapq.heappop(ready[at])
                free[at] = False
                held[at] += not is_back
                most[at] = max(most[at], held[at])
                heapq.heappush(events, (now + (backward if is_back else forward)[at], 0, at, k, is_back))
        if not events:
            return ListSchedule(tuple(ends), tuple(most))
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, at, k, is_back = heapq.heappop(events)
            if kind:
                heapq.heappush(ready[at], (-(back if is_back else way)[at], k, is_back))
                continue
            free[at] = True
            if is_back:
                held[at] -= 1
                ends[at] = now
            target = at - 1 if is_back else at + 1
            if not is_back and target == stages:
                heapq.heappush(ready[at], (-back[at], k, 1))
            elif target >= 0:
                hop, step = hops[min(at, target)], target - at
                sent[at, step] = max(sent[at, step], now) + hop
                heapq.heappush(events, (sent[at, step], 1, target, k, is_back))


@dataclass(frozen=True)
class SppCost:
    """Rates plans of stages with replicas of their own, which take devices one after the other.

    Attributes:
        graph: all layers.
        links: bandwidths of all pairs of devices, in the order in which stages take them.
        memory: bytes of a device; None for no limit.
        microbatches: M, per batch.
    """

    graph: LayerGraph
    links: Floats
    memory: float | None
    microbatches: int

    def group(self, first: int, last: int) -> float:
        """Return the slowest link among the devices from `first` up to `last`, not included; infinite for one."""
        inner = self.links[first:last, first:last]
        return float(inner[~np.eye(last - first, dtype=bool)].min(initial=np.inf))

    def between(self, first: int, middle: int, last: int) -> float:
        """Return the slowest link from the devices before `middle` to those from there on."""
        return float(self.links[first:middle, middle:last].min())

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs, per microbatch: a batch over M."""
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return Rating(NAME, math.inf, (), "its stages are not replicated on single devices")
        check_halves(self.graph)
        used = sum(stage.replicas for stage in stages)
        if used > len(self.links):
            return Rating(NAME, math.inf, (), f"it needs {used} of {len(self.links)} devices")
        homes = {number: at for at, stage in enumerate(stages) for number in stage.layers}
        forward, backward, sums, hops, first = [], [], [], [], 0
        for at, stage in enumerate(stages):
            layers, count = [self.graph.layers[number] for number in stage.layers], stage.replicas
            forward.append(sum(layer.forward or 0.0 for layer in layers) / count)
            backward.append(sum(layer.seconds for layer in layers) / count - forward[-1])
            ring = 2 * (count - 1) / count * sum(layer.parameters for layer in layers)
            sums.append(ring / self.group(first, first + count))
            if at:
                before = first - stages[at - 1].replicas
                crossing = sum(e.bytes for e in self.graph.edges if homes[e.source] < at <= homes[e.target])
                hops.append(crossing / (self.between(before, first, first + count) * count))
            first += count
        played = list_schedule(forward, backward, hops, self.microbatches)
        batch = max(end + ring for end, ring in zip(played.ends, sums, strict=True))
        ratings, fault = [], ""
        for at, stage in enumerate(stages):
            ways = [self.graph.layers[number].ways[0] for number in stage.layers]
            memory = sum(way.memory + played.held[at] * way.memory_per_microbatch for way in ways)
            links = 2 * max(hops[max(at - 1, 0) : at + 1], default=0.0)
            compute, ring = forward[at] + backward[at], sums[at] / self.microbatches
            ratings.append(
                StageRating(
                    max(compute, links) + ring, {"compute": compute, "links": links, "gradient sums": ring}, memory
                )
            )
            if self.memory is not None and memory > self.memory * TOLERANCE:
                fault = fault or f"stage {at} needs {human_bytes(memory, 2)} of {human_bytes(self.memory, 2)}"
        seconds = math.inf if fault else batch / self.microbatches
        return Rating(NAME, seconds, tuple(ratings), fault)
