"""What cost functions of a graph on devices have in common: the two, and what a plan needs that is not there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.byte_sizes import human_bytes
from penstock.plan.profile.layer_graph import LayerGraph
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
        """Yield which devices and memory a plan needs that are not there."""
        if used > self.devices.count:
            yield f"it needs {used} of {self.devices.count} devices"
        limit = math.inf if self.devices.memory is None else self.devices.memory
        for at, each in enumerate(ratings):
            if each.memory is not None and each.memory > limit * TOLERANCE:
                yield f"stage {at} needs {human_bytes(each.memory, 2)} of {human_bytes(limit, 2)}"
