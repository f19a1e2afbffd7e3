"""What the cost functions of planners share: a graph on devices, the ways of its layers, and what a plan lacks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.byte_sizes import human_bytes
from penstock.checks import did_you_mean
from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph, Way
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating

TOLERANCE = 1 + 1e-12
"""Sums in another order differ in their last bits: what exceeds the memory by less fits."""


@dataclass(frozen=True)
class GraphCost(ABC):
    """A cost function of a graph on devices.

    Attributes:
        name: of the cost function.
        graph: all layers.
        devices: to plan for.
        microbatches: per batch.
    """

    name: ClassVar[str]
    graph: LayerGraph
    devices: Devices
    microbatches: int

    @abstractmethod
    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs, per microbatch of all pipelines together."""

    @property
    def limit(self) -> float:
        """The bytes that fit on a device."""
        return math.inf if self.devices.memory is None else self.devices.memory * TOLERANCE

    def refused(self, why: str) -> Rating:
        """Return the rating of a plan of another form."""
        return Rating(self.name, math.inf, (), why)

    def rating(
        self, ratings: Sequence[StageRating], used: int, seconds: Callable[[], float], faults: Iterable[str] = ()
    ) -> Rating:
        """Return the rating of a plan: infinite if it does not fit.

        Args:
            ratings: of its stages.
            used: devices.
            seconds: of a microbatch, if it fits.
            faults: why it does not.
        """
        found = [*faults, *self._missing(ratings, used)]
        return Rating(self.name, math.inf if found else seconds(), tuple(ratings), found[0] if found else "")

    def _missing(self, ratings: Sequence[StageRating], used: int) -> Iterable[str]:
        if used > self.devices.count:
            yield f"it needs {used} of {self.devices.count} devices"
        for at, each in enumerate(ratings):
            if each.memory is not None and each.memory > self.limit:
                yield f"stage {at} needs {human_bytes(each.memory, 2)} of {human_bytes(self.devices.memory or 0, 2)}"

    def options(self, number: int) -> Sequence[Way]:
        """Return the ways of a layer that plans may name."""
        return self.graph.layers[number].ways

    def ways(self, stage: PlannedStage) -> list[Way]:
        """Return how each layer of a stage is executed; the first way with its tensor degree if it names none.

        Raises:
            ConfigError: a layer has no such way.
        """
        names = stage.ways or ("",) * len(stage.layers)
        return [self._way(number, stage.tensor, name) for number, name in zip(stage.layers, names, strict=True)]

    def _way(self, number: int, tensor: int, name: str) -> Way:
        ways, layer = [way for way in self.options(number) if way.tensor == tensor], self.graph.layers[number].name
        for way in ways:
            if name in ("", way.name):
                return way
        if not ways:
            raise ConfigError(f"layer {layer!r} has no option with tensor degree {tensor}")
        raise ConfigError(f"layer {layer!r} has no option {name!r}.{did_you_mean(name, [way.name for way in ways])}")

    def border_bytes(self, stages: tuple[PlannedStage, ...]) -> list[float]:
        """Return the bytes that cross the border before each stage, and after the last one.

        Whatever is read further on passes all borders before it.
        """
        homes = homes_of(stages)
        ends = [(homes[edge.source], homes[edge.target], edge.bytes) for edge in self.graph.edges]
        return [sum(size for a, b, size in ends if a < at <= b) for at in range(len(stages) + 1)]


def homes_of(stages: tuple[PlannedStage, ...]) -> dict[int, int]:
    """Return the number of the stage that has each layer."""
    return {number: at for at, stage in enumerate(stages) for number in stage.layers}


def held(ways: Iterable[Way], in_flight: int) -> float:
    """Return the bytes of layers with so many microbatches in flight."""
    return sum(way.memory + in_flight * way.memory_per_microbatch for way in ways)


def recompute_of(graph: LayerGraph, stage: PlannedStage) -> str | None:
    """Return whether a stage recomputes its blocks, as `penstock train` knows it; None if it does so with some of them.

    Layers that have no option with recompute do not count.
    """
    found = set()
    for number, way in zip(stage.layers, stage.ways, strict=True) if stage.ways else ():
        can = any("recomp" in each.name for each in graph.layers[number].ways if each.tensor == 1)
        if can or "recomp" in way:
            found.add("recomp" in way)
    return None if len(found) > 1 else "block" if found == {True} else "none"


def bandwidths(devices: Devices, width: int, depth: int) -> tuple[float, float]:
    """Return the bandwidth between replicas and the one between stages, where replicas stand side by side.

    Replicas use the innermost level if there are fewer than its units, stages do if all of them fit into it; other
    traffic uses the slowest level.
    """
    inner, slow = devices.levels[0], devices.bandwidth
    if len(devices.levels) == 1:
        return slow, slow
    return (
        inner.bandwidth if width < inner.units else slow,
        inner.bandwidth if width * depth <= inner.units else slow,
    )


def bandwidth_among(devices: Devices, first: int, last: int) -> float:
    """Return the bandwidth among the devices from `first` up to `last`, not included: the slowest of all levels,
    unless they stand in one unit of the innermost one.
    """
    inner = devices.levels[0]
    return inner.bandwidth if first // inner.units == (last - 1) // inner.units else devices.bandwidth
