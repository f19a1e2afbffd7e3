"""What sharded stages send over the network of parallel pipelines: bytes, and the time they take."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import ConfigError
from penstock.schedule.ir.schedule import Action, Op, Schedule, Stage
from penstock.schedule.ir.sharding import Level


@dataclass(frozen=True)
class Network:
    """The network between the parallel pipelines of a sharded schedule.

    A rank has one lane, on which its gathers and sums come one after the other (a sum over several ranks of a
    bidirectional pipeline has one of its own).

    Attributes:
        schedule: whose gathers and sums it carries.
        width: w, the number of pipelines.
        bandwidth: bytes that a rank sends in a unit of time, while it receives as many.
        parameters: of a stage.
        weight_bytes, gradient_bytes: of a parameter.
        work: time of a core that a rank takes, beside its passes, for each byte that it sends in gathers and sums while
            it receives as many: cutting, copying, adding, and the kernel's. The bytes are under way after that.
    """

    schedule: Schedule
    width: int
    bandwidth: float = math.inf
    parameters: float = 1.0
    weight_bytes: int = 4
    gradient_bytes: int = 4
    work: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no network."""
        if self.width < 1:
            raise ConfigError(f"width must be at least 1, got {self.width}")
        for name in ("bandwidth", "parameters"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if not 0 <= self.work < math.inf:
            raise ConfigError(f"work must be a finite number, not negative; got {self.work}")

    @classmethod
    def of_time(cls, schedule: Schedule, time: float) -> Network:
        """Return a network of two pipelines on which gathers of all stages of a rank take some time together."""
        parameters = schedule.ranks / schedule.num_stages
        network = cls(schedule, 2, parameters=parameters)
        return replace(network, bandwidth=network.weight_bytes / 2 / time)

    @classmethod
    def of_scatter(cls, schedule: Schedule, width: int, nbytes: float, seconds: float) -> Network:
        """Return a network on which a gather of a stage of some bytes takes some seconds, latencies included."""
        network = cls(schedule, width, parameters=nbytes, weight_bytes=1, gradient_bytes=1)
        holders = width * schedule.directions
        return replace(network, bandwidth=(holders - 1) / holders * nbytes / seconds if seconds else math.inf)

    def sent(self, action: Action) -> float:
        """Return the bytes that a rank sends for a GATHER or REDUCE; 0 for anything else."""
        return self.sent_for(action.op, action.stage)

    def sent_for(self, op: Op, stage: Stage) -> float:
        """Return the bytes that a rank sends for a GATHER or REDUCE of a stage.

        Of s shards a gather sends the own one to s - 1 others. A reduce-scatter over n holders sends each of them its
        part of a gradient; a whole sum sends the sums back, too. All holders of a stage have shards of their own, but
        with level full the copies in a pipeline are taken to have the same.
        """
        holders = self.width * self._copies[stage.index]
        shards = self.width if self.schedule.sharding.level is Level.FULL else holders
        if op is Op.GATHER:
            return (shards - 1) / shards * self.parameters * self.weight_bytes
        if op is not Op.REDUCE:
            return 0.0
        gradient = self.parameters * self.gradient_bytes
        if self.schedule.sharding.level.splits_gradients:
            return (holders - 1) / shards * gradient
        return 2 * (holders - 1) / holders * gradient

    @cached_property
    def _copies(self) -> Counter[int]:
        """How many copies of each stage a pipeline has, by index."""
        return Counter(stage.index for stage in self.schedule.stages)

    def time(self, action: Action) -> float:
        """Return how long a GATHER or REDUCE is under way on a link of its own."""
        return self.sent(action) / self.bandwidth

    def work_for(self, action: Action) -> float:
        """Return the time of a core that a GATHER or REDUCE takes of each rank."""
        return self.work * self.sent(action)

    def per_batch(self, rank: int) -> dict[str, float]:
        """Return the bytes that a rank sends in gathers and in sums for each batch, in the steady state."""
        period = self.schedule.programs[rank].period
        return {
            what: sum(self.sent(a) for a in period if a.op is op)
            for what, op in (("gathers", Op.GATHER), ("reductions", Op.REDUCE))
        }
