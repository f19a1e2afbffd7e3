"""SPP's planner (Luo et al., arXiv 2204.10562): stages with replicas of their own, on devices that any links join.

Each stage takes F / r and B / r for a microbatch, which its r replicas share. A batch takes what a list schedule does:
whenever a stage is free it runs, of the passes whose inputs are there, the one with the longest way to the end of its
microbatch, and of these the first microbatch. A message takes its bytes over the slowest link between two groups of
replicas, and over as many of these as receive; messages of one direction follow each other. A stage ends with the ring
that adds up its gradients, on the slowest link of its group. Memory counts the microbatches that this order holds.

Devices are ordered by recursive minimum cuts of the graph of bandwidths: a cut that least bandwidth crosses divides
them in two, each half likewise, down to single ones. So devices that stand side by side are joined by fast links, and
stages cross slow ones as seldom as can be. For each number of stages a dynamic program over (layers, devices used,
replicas of the last stage) finds the plan along this order whose slowest part is fastest: a stage with its passes of a
batch and the sum of its gradients, or the messages of a batch between two stages. The list schedule decides among the
numbers of stages. Layers are cut along one topological order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.checks import is_number
from penstock.errors import ConfigError
from penstock.plan.planners.dapple import ReplicatedCost, best_replicated, check_halves
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import held
from penstock.plan.stages.layer_row import (
    CutProgram,
    Floats,
    State,
    between,
    border_bytes,
    later,
    row_stages,
    running_sums,
)
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating

MOST_LINKED = 128
"""Devices of a matrix of links."""

_MOST_WORK = 2e9  # cells of the dynamic program


# --- links ------------------------------------------------------------------------------------------------------------


def link_matrix(devices: Devices) -> Floats:
    """Return the bandwidths between all pairs of devices that stand in levels.

    Raises:
        ConfigError: there are too many.
    """
    count = devices.count
    if count > MOST_LINKED:
        raise ConfigError(f"links of each pair are known for {MOST_LINKED} devices at most, got {count}")
    number = np.arange(count)
    found = np.zeros((count, count))
    size = 1
    for level in devices.levels:
        inside = number // (size * level.units)
        apart = (number[:, None] // size != number[None, :] // size) & (inside[:, None] == inside[None, :])
        found[apart] = level.bandwidth
        size *= level.units
    return found


def links_between(devices: Devices, links: Floats | None) -> Floats:
    """Return the bandwidths of all pairs of devices: those given, or as the levels of devices say.

    Raises:
        ConfigError: they are those of another number of devices.
    """
    if links is None:
        return link_matrix(devices)
    if len(links) != devices.count:
        raise ConfigError(f"the matrix of links is that of {len(links)} devices, not {devices.count}")
    return links


def checked_links(rows: object) -> Floats:
    """Return a matrix of bandwidths.

    Raises:
        ConfigError: it is none: not square, not symmetric, or with a number that is not positive beside its diagonal.
    """
    if not isinstance(rows, list) or not rows or len(rows) > MOST_LINKED:
        raise ConfigError(f"links must be a list of 1 to {MOST_LINKED} rows of numbers")
    if not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        raise ConfigError(f"links must be square: {len(rows)} rows need as many numbers each")
    for at, row in enumerate(rows):
        for to, value in enumerate(row):
            if at != to and not (is_number(value) and 0 < value < 1e30):
                raise ConfigError(f"links: bytes per second from {at} to {to} must be above 0, got {value!r:.40}")
    found = np.array([[0.0 if a == b else float(v) for b, v in enumerate(row)] for a, row in enumerate(rows)])
    if not np.array_equal(found, found.T):
        at, to = (int(each[0]) for each in np.nonzero(found != found.T))
        raise ConfigError(
            f"links must be symmetric: {at} to {to} has {found[at, to]:g}, the way back {found[to, at]:g}"
        )
    return found


def least_cut(weights: Floats) -> tuple[float, frozenset[int]]:
    """Return the least weight of a cut of a graph, and one side of it (Stoer and Wagner, J. ACM 1997).

    Args:
        weights: symmetric, of at least two nodes.
    """
    left, groups = weights.copy(), [frozenset([n]) for n in range(len(weights))]
    best: tuple[float, frozenset[int]] = (np.inf, frozenset())
    while len(groups) > 1:
        order, attached = [0], left[0].copy()
        attached[0] = -np.inf
        while len(order) < len(groups):
            nearest = int(np.argmax(attached))
            order.append(nearest)
            attached += left[nearest]
            attached[nearest] = -np.inf
        last, before = order[-1], order[-2]
        cut = float(left[last].sum() - left[last, last])
        if cut < best[0]:
            best = cut, groups[last]
        left[before] += left[last]
        left[:, before] += left[:, last]
        left[before, before] = 0.0
        left = np.delete(np.delete(left, last, 0), last, 1)
        groups[before] |= groups[last]
        del groups[last]
    return best


def device_order(weights: Floats) -> tuple[int, ...]:
    """Return the devices in the order in which stages take them, by the bandwidths of all pairs."""
    placed: list[int] = []

    def place(devices: list[int]) -> None:
        if len(devices) == 1:
            placed.extend(devices)
            return
        _, side = least_cut(weights[np.ix_(devices, devices)])
        halves = [[d for n, d in enumerate(devices) if (n in side) is one] for one in (True, False)]
        near = placed[-1:]
        halves.sort(key=lambda half: (-float(weights[np.ix_(near, half)].sum()) / len(half), half[0]))
        for half in halves:
            place(half)

    place(list(range(len(weights))))
    return tuple(placed)


# --- the cost ---------------------------------------------------------------------------------------------------------


def list_schedule(
    forward: list[float], backward: list[float], hops: list[float], microbatches: int
) -> tuple[list[float], list[int]]:
    """Return when the last backward of each stage ends, and how many microbatches it has in flight at most.

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
    in_flight, most, ends = [0] * stages, [0] * stages, [0.0] * stages
    events: list[tuple[float, int, int, int, int]] = []  # (time, kind, stage, microbatch, is backward)
    now = 0.0
    while True:
        for at in range(stages):
            if free[at] and ready[at]:
                _, k, is_back = heapq.heappop(ready[at])
                free[at] = False
                in_flight[at] += not is_back
                most[at] = max(most[at], in_flight[at])
                heapq.heappush(events, (now + (backward if is_back else forward)[at], 0, at, k, is_back))
        if not events:
            return ends, most
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, at, k, is_back = heapq.heappop(events)
            if kind:
                heapq.heappush(ready[at], (-(back if is_back else way)[at], k, is_back))
                continue
            free[at] = True
            if is_back:
                in_flight[at] -= 1
                ends[at] = now
            target = at - 1 if is_back else at + 1
            if not is_back and target == stages:
                heapq.heappush(ready[at], (-back[at], k, 1))
            elif target >= 0:
                hop, step = hops[min(at, target)], target - at
                sent[at, step] = max(sent[at, step], now) + hop
                heapq.heappush(events, (sent[at, step], 1, target, k, is_back))


@dataclass(frozen=True)
class SppCost(ReplicatedCost):
    """Rates plans whose stages take devices one after the other, in the order of SPP: a batch over M.

    Attributes:
        links: bandwidths of all pairs of devices; None: as the levels of devices say.
    """

    name = "spp"
    links: Floats | None = None

    @cached_property
    def _ordered_links(self) -> Floats:
        """Those between the devices in that order."""
        return np.asarray(self._links[np.ix_(self.order, self.order)])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The devices as stages take them.

        Raises:
            ConfigError: the links are those of another number of devices, or of too many.
        """
        return device_order(self._links)

    @cached_property
    def _links(self) -> Floats:
        return links_between(self.devices, self.links)

    def among(self, group: range) -> float:
        links = self._ordered_links[group.start : group.stop, group.start : group.stop]
        return float(links[~np.eye(len(group), dtype=bool)].min(initial=np.inf))

    def toward(self, group: range, following: range) -> float:
        return float(self._ordered_links[group.start : group.stop, following.start : following.stop].min())

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        used = sum(stage.replicas for stage in stages)
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return self.refused("its stages are not replicated on single devices")
        check_halves(self.graph)
        if used > self.devices.count:
            return self.refused(f"it needs {used} of {self.devices.count} devices")
        parts = [(stage, stage.replicas, each) for stage, each in zip(stages, self.replicated(stages), strict=True)]
        forward = [each.forward / count for _, count, each in parts]
        backward = [each.both / count - own for own, (_, count, each) in zip(forward, parts, strict=True)]
        hops, rings = [each.hop for _, _, each in parts[1:]], [each.ring for _, _, each in parts]
        ends, flights = list_schedule(forward, backward, hops, self.microbatches)
        batch = max(end + ring for end, ring in zip(ends, rings, strict=True))
        ratings = []
        for at, stage in enumerate(stages):
            compute, ring = forward[at] + backward[at], rings[at] / self.microbatches
            links = 2 * max(hops[max(at - 1, 0) : at + 1], default=0.0)
            memory = held((self.graph.layers[number].ways[0] for number in stage.layers), flights[at])
            causes = {"compute": compute, "links": links, "gradient sums": ring}
            ratings.append(StageRating(max(compute, links) + ring, causes, memory))
        return self.rating(ratings, used, lambda: batch / self.microbatches)


# --- the search -------------------------------------------------------------------------------------------------------


def plan_as_spp(graph: LayerGraph, devices: Devices, microbatches: int, links: Floats | None = None) -> Search:
    """Return the plan of the published search, on all devices.

    Args:
        graph: of the model.
        devices: how many, with what memory.
        microbatches: M, per batch.
        links: bandwidths of all pairs of devices; None: as the levels of devices say.

    Raises:
        ConfigError: the profile does not tell forward and backward apart, or the search would be too large.
    """
    cost = SppCost(graph, devices, microbatches, links)
    notes = (f"devices in the order {' '.join(map(str, cost.order))}",)
    check_halves(graph)
    return best_replicated(replace(plan, notes=notes) for plan in balanced_plans(cost))


def balanced_plans(cost: SppCost) -> Iterator[Plan]:
    """Yield, for each number of stages, the plan whose slowest part is fastest, on all devices.

    Raises:
        ConfigError: the search would be too large.
    """
    graph, devices, layers = cost.graph, cost.devices.count, len(cost.graph.layers)
    deepest = min(devices, layers)
    if float(deepest) * devices**3 / 6 * (layers + 1) ** 2 > _MOST_WORK:
        raise ConfigError(
            f"planner 'spp' would look at too many plans of {layers} layers on {devices} devices; merge layers, or "
            "plan for fewer devices"
        )
    parts, program = SlowestParts(cost), CutProgram(layers + 1, (0, 0))
    for _ in range(deepest):
        program.add_stage(parts.moves)
        last = {state: times[-1] for state, times in program.least.items() if state[0] == devices}
        state = min(sorted(last, reverse=True), key=lambda each: last[each], default=None)
        if state is not None and math.isfinite(last[state]):
            cuts, states = program.trace(state)
            stages = row_stages(graph, cuts, [count for _, count in states])
            yield Plan(cost.name, stages, cost.rate(stages))


class SlowestParts:
    """The time of each stage, or of the messages before it: the larger one, for a batch."""

    def __init__(self, cost: SppCost) -> None:
        self._cost, row = cost, [cost.graph.layers[number] for number in cost.graph.order]
        self._seconds = between(running_sums(layer.seconds for layer in row))
        self._parameters = between(running_sums(layer.parameters for layer in row))
        self._crossing = border_bytes(cost.graph)[:, None]

    def moves(self, state: State) -> Iterator[tuple[State, Floats]]:
        """Yield what one more stage may do, behind so many devices of which the last stage uses some."""
        used, before = state
        for count in range(1, self._cost.devices.count - used + 1):
            yield (used + count, count), self.times(used, count, before)

    def times(self, start: int, count: int, before: int) -> Floats:
        """Return the times by the first layer and the one after the last.

        Args:
            start, count: the devices of the stage.
            before: replicas of the stage before; 0 for the first stage.
        """
        m, group = self._cost.microbatches, range(start, start + count)
        ring = 2 * (count - 1) / count / self._cost.among(group)
        stage = m * self._seconds / count + ring * self._parameters
        if before:
            speed = self._cost.toward(range(start - before, start), group) * count
            stage = np.maximum(stage, 2 * m * self._crossing / speed)
        return np.where(later(stage), stage, np.inf)
