"""The cost function of PipeDream's planner, as its authors released it (`optimizer/optimizer_graph_hierarchical.py`).

A pipeline is as slow as its slowest stage. A stage with r replicas takes (compute + 4 (r - 1) P / (r B)) / r, for P
bytes of parameters and a bandwidth of B: a sum, with a parameter server's traffic. The paper's recurrence (SOSP 2019,
sec. 3.1) has the larger of the two instead. With levels of devices, "compute" is the time of the pipeline inside a
unit, and the first stage of a pipeline divides its traffic by the units of the level below, as the program does.
Activations cost time only if a compression ratio is given. With a limit of memory, the layers' outputs and
parameters, times ceil((M - used) / r) for M units of the level of which `used` stand before or in the stage, must
fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.byte_sizes import human_bytes
from penstock.plan.profile.layer_graph import LayerEdge, LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.layer_ideals import bits
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating

NAME = "pipedream"


def placed_layers(graph: LayerGraph) -> tuple[int, ...]:
    """Return the layers that the planner places: inputs belong to the first stage, unread items of tuples to no one.

    These are sources of the kind "Input.." and, once they are gone, sinks of the kind "__getitem__..".
    """
    inputs = {n for n, layer in enumerate(graph.layers) if layer.kind.startswith("Input") and not graph.inputs[n]}
    unread = {
        n
        for n, layer in enumerate(graph.layers)
        if layer.kind.startswith("__getitem__") and not graph.readers[n] and n not in inputs
    }
    kept = tuple(n for n in range(len(graph.layers)) if n not in inputs | unread)
    return kept or tuple(range(len(graph.layers)))


def restricted(graph: LayerGraph, layers: tuple[int, ...]) -> LayerGraph:
    """Return a graph of some of the layers, with the edges among them."""
    places = {number: place for place, number in enumerate(layers)}
    edges = (
        LayerEdge(places[edge.source], places[edge.target], edge.bytes)
        for edge in graph.edges
        if edge.source in places and edge.target in places
    )
    return replace(graph, layers=tuple(graph.layers[number] for number in layers), edges=tuple(edges))


def boundary_bytes(graph: LayerGraph, prefix: int) -> float:
    """Return the bytes that leave a prefix, as the program counts them.

    These are the outputs of its last layers and of those that, seen from one of the last ones, are also read elsewhere.
    """
    members = bits(prefix)
    last = [n for n in members if not any(prefix >> edge.target & 1 for edge in graph.readers[n])]
    leaving = set(last)
    for end in last:
        before, waiting = {end}, [end]
        while waiting:
            for edge in graph.inputs[waiting.pop()]:
                if edge.source not in before:
                    before.add(edge.source)
                    waiting.append(edge.source)
        leaving |= {n for n in before - {end} if any(edge.target not in before for edge in graph.readers[n])}
    return sum(graph.layers[n].output for n in leaving)


def stage_seconds(compute: float, parameters: float, replicas: int, bandwidth: float, divided_by: int) -> float:
    """Return the time of a stage; see above. Arrays do as well as numbers."""
    return (compute + 4 * (replicas - 1) * parameters / (bandwidth * replicas) / divided_by) / replicas


@dataclass(frozen=True)
class PipeDreamCost:
    """Rates plans of a graph.

    Attributes:
        graph: all layers; those that are not placed cost nothing.
        devices: with as many levels as the stages of a plan are deep.
        compression: the compression ratio of activations; None: they cost no time.
    """

    graph: LayerGraph
    devices: Devices
    compression: float | None = None

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs."""
        kept = set(placed_layers(self.graph))
        ratings, faults = self._pipeline(stages, len(self.devices.levels) - 1, 0, kept)
        seconds = math.inf if faults else max(rating.seconds for rating in ratings)
        return Rating(NAME, seconds, tuple(ratings), faults[0] if faults else "")

    def _pipeline(
        self, stages: tuple[PlannedStage, ...], level: int, before: int, kept: set[int]
    ) -> tuple[list[StageRating], list[str]]:
        """Return what the stages of a pipeline on one level cost, and what does not fit."""
        units, bandwidth = self.devices.levels[level].units, self.devices.levels[level].bandwidth
        below = self.devices.levels[level - 1].units if level else 1
        found, faults, used = list[StageRating](), list[str](), 0
        if (needed := sum(stage.replicas for stage in stages)) > units:
            faults.append(f"it needs {needed} units of a level that has {units}")
        for at, stage in enumerate(stages):
            layers = [number for number in stage.layers if number in kept]
            used += stage.replicas
            if level and stage.inner:
                inner, more = self._pipeline(stage.inner, level - 1, before, kept)
                faults += more
                compute = max(rating.seconds for rating in inner)
            else:
                compute = sum(self.graph.layers[number].seconds for number in layers)
            after = before | sum(1 << number for number in layers)
            parameters = sum(self.graph.layers[number].parameters for number in layers)
            seconds = stage_seconds(compute, parameters, stage.replicas, bandwidth, 1 if at else below)
            alone = compute / stage.replicas
            parts = {"compute": alone, "gradient sums": seconds - alone}
            if self.compression is not None and at:
                parts["links"] = self._transfer(before, after, bandwidth * stage.replicas, kept)
                seconds = max(seconds, parts["links"])
            own = [self.graph.layers[number] for number in layers]
            kept_bytes = parameters + sum(layer.output + layer.frozen for layer in own)
            memory = math.ceil((units - used) / stage.replicas) * kept_bytes
            if self.devices.memory is not None and memory > self.devices.memory:
                faults.append(f"stage {at} stashes {human_bytes(memory, 2)} of {human_bytes(self.devices.memory, 2)}")
            found.append(StageRating(seconds, parts, memory))
            before = after
        return found, faults

    def _transfer(self, before: int, after: int, bandwidth: float, kept: set[int]) -> float:
        """Return the time of the slower one of a stage's transfers: what it reads, and what it hands on."""
        assert self.compression is not None
        whole = tuple(sorted(kept))
        places = {number: place for place, number in enumerate(whole)}
        graph = restricted(self.graph, whole)
        sides = [sum(1 << places[number] for number in bits(side) if number in places) for side in (before, after)]
        if sides[1] == (1 << len(whole)) - 1:
            sides.pop()
        return max(2 * boundary_bytes(graph, side) / bandwidth / self.compression for side in sides)
