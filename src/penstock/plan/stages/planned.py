"""Plans: stages on devices, and how a cost function rates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.plan.stages.device_hierarchy import StageDevices

COMPUTE = "compute"
LINKS = "links"
SUMS = "gradient sums"
COPIES = "copies"
CORES = "shared cores"
UPDATES = "updates"
BUBBLE = "bubble"

PARTS = (COMPUTE, LINKS, SUMS, COPIES, CORES, UPDATES, BUBBLE)
"""The names of the parts of a stage's time, in the order in which they are shown."""

LEAST_GAIN = 1.005
"""How many times as fast a plan is for that to be said: less may be rounding, or the cuts that were tried."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan.

    Attributes:
        layers: numbers of the layers in the graph.
        replicas: how many copies share the microbatches.
        tensor: on how many devices each copy is spread.
        ways: names of the options by which the layers are executed, one each; empty where a planner knows none.
        inner: with levels of devices, the pipeline that each copy is, on one unit of this level; empty for one device.
        sharded: whether the copies divide the optimizer's state among them.
        in_turns: whether it runs on the same devices as the other stages, one after the other.
        on: the devices of its copies; None if all devices are alike.
        offloaded: whether its activations are in the memory of the host between forward and backward.
    """

    layers: tuple[int, ...]
    replicas: int = 1
    tensor: int = 1
    ways: tuple[str, ...] = ()
    inner: tuple[PlannedStage, ...] = ()
    sharded: bool = False
    in_turns: bool = False
    on: StageDevices | None = None
    offloaded: bool = False

    @property
    def devices(self) -> int:
        """The devices of all copies."""
        each = sum(stage.devices for stage in self.inner) if self.inner else self.tensor
        return self.replicas * each


@dataclass(frozen=True)
class StageRating:
    """What a stage costs.

    Attributes:
        seconds: per microbatch of the pipeline, as the cost function adds up or compares its parts.
        parts: seconds by cause, named as in `PARTS`.
        memory: bytes of a device; None where the cost function has no such notion.
        on_host: bytes that each device has in the memory of its host.
        kinds: the bytes of `memory` by kind, which add up to it; empty where the cost function knows none.
    """

    seconds: float
    parts: dict[str, float]
    memory: float | None = None
    on_host: float = 0.0
    kinds: Mapping[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True)
class Rating:
    """How a cost function rates a plan.

    Attributes:
        cost: the name of the cost function.
        seconds: per microbatch (a "sample" of Piper): what planners minimize; infinite if the plan does not fit.
        stages: the rating of each stage.
        fault: why the plan does not fit, or "".
    """

    cost: str
    seconds: float
    stages: tuple[StageRating, ...]
    fault: str = ""

    @property
    def slowest_seconds(self) -> float:
        """The time of the slowest stage."""
        return max(stage.seconds for stage in self.stages)

    @property
    def slowest(self) -> int:
        """The number of the slowest stage, counted from 0."""
        return max(range(len(self.stages)), key=lambda at: self.stages[at].seconds)


@dataclass(frozen=True)
class Skipped:
    """A class of candidates that was not looked into, and why nothing is lost.

    Attributes:
        what: the class in words.
        bound: why no member of it can be the answer, with the number.
    """

    what: str
    bound: str


@dataclass(frozen=True)
class Excluded:
    """A configuration that would be faster than the best plan, but for a limit of memory.

    Attributes:
        what: it is, in words.
        seconds: per sample, without the limit.
        gain: how many times as fast as the plan.
    """

    what: str
    seconds: float
    gain: float


@dataclass(frozen=True)
class Plan:
    """A plan as a planner found it.

    Attributes:
        planner: its name.
        stages: in the order of the pipeline.
        rating: by the cost function that it was searched for.
        notes: what there is to say about it.
        samples: of a microbatch.
        settings: keys of `penstock train` that run it; empty where no run is possible.
        chunks: stages on each device.
    """

    planner: str
    stages: tuple[PlannedStage, ...]
    rating: Rating
    notes: tuple[str, ...] = ()
    samples: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    chunks: int = 1

    @property
    def devices(self) -> int:
        """How many devices it uses."""
        each = [stage.devices for stage in self.stages]
        return max(each) if self.stages[0].in_turns else sum(each) // self.chunks

    @property
    def seconds_per_sample(self) -> float:
        """The time by its rating, per sample."""
        return self.rating.seconds / self.samples


@dataclass(frozen=True)
class Search:
    """What a planner answers, and all that explains it.

    Attributes:
        plan: the best one; None if none fits.
        skipped: the classes of candidates that were not looked into.
        why: why there is no plan, with what comes closest where that is known; or "".
        excluded: what memory kept from being the plan; None if it is not known that anything was.
        others: the best plans of other methods, fastest first.
    """

    plan: Plan | None
    skipped: tuple[Skipped, ...] = ()
    why: str = ""
    excluded: Excluded | None = None
    others: tuple[Plan, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All of them, the best one first."""
        return () if self.plan is None else (self.plan, *self.others)
