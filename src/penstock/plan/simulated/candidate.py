"""A configuration before it is cut into stages, and the least that it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.plan.planners.two_bw import Sized
from penstock.plan.simulated.block_chain import BlockChain, PassSums
from penstock.plan.simulated.planned_methods import PlannedMethod
from penstock.plan.simulated.schedule_cache import ScheduleKey
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.two_bw_cost import bandwidths


@dataclass(frozen=True)
class Candidate:
    """A configuration before it is cut into stages.

    Attributes:
        sized: the graph at a microbatch size.
        method: with the options of its order.
        depth, width: ranks of a pipeline, and pipelines.
        sharding: what pipelines divide of the state of stages: "none", "optimizer" or "gradients".
    """

    sized: Sized
    method: PlannedMethod
    depth: int
    width: int
    sharding: str = "none"

    @property
    def stages(self) -> int:
        """Of a pipeline."""
        return self.depth * self.method.chunks

    @property
    def microbatches(self) -> int:
        """Per pipeline and batch."""
        return self.sized.microbatches // self.width

    @property
    def samples(self) -> int:
        """Per batch."""
        return self.sized.microbatches * self.sized.samples

    @property
    def passes(self) -> int:
        """Forwards of a batch of a pipeline."""
        return self.stages * self.microbatches

    @property
    def shards(self) -> int:
        """Pipelines that divide the state of a stage among them."""
        return 1 if self.sharding == "none" else self.width

    @property
    def schedule(self) -> ScheduleKey:
        """What its schedule is known by."""
        return ScheduleKey(self.method, self.depth, self.microbatches, self.width > 1, self.sharding)

    def passes_of(self, chain: BlockChain) -> PassSums:
        """Return what passes of its method take.

        Raises:
            ValueError: the halves of backwards are unknown.
        """
        found = chain.halved if self.method.halved else chain.passes
        if found is None:
            raise ValueError("the profile does not tell the halves of backwards apart")
        return found

    def bound(self, chain: BlockChain, devices: Devices, slowest: float = 0.0, total: float = 0.0) -> float:
        """Return the seconds per sample that it takes at least.

        A rank is busy for m microbatches, and a lane of messages for m of these, or more if a rank has several stages.
        With a flush the batch begins once the forwards of the stages before have run, and ends with their backwards, of
        halved ones the first halves; then come the sums of gradients and updates. So with one stage on each rank, if T
        is the time of the batch without these and t_i that of what others wait for in a stage, m t_s + sum of t_i
        before s <= T for every stage, hence T (1 - (1 - 1/m)^d) is at least the sum of all t.

        Args:
            chain: of its blocks.
            devices: of whose links messages and sums of gradients take time.
            slowest: at least so many seconds the slowest rank takes for a microbatch.
            total: and all together.
        """
        m, d, passes = self.microbatches, self.depth, self.passes_of(chain)
        across, along = bandwidths(devices, self.width, d)
        total = max(float(passes.busy[-1]), total)
        slowest = max(slowest, total / d, float(np.diff(passes.busy).max()))
        message = float(chain.crossing[1:-1].min(initial=math.inf)) / along if d > 1 else 0.0
        steady = m * max(slowest, self.messages * message)
        sums = self.sums(float(chain.parameters[0, -1]) / self.stages, across)
        if not self.method.flushes:
            return max(steady, max(sums)) / self.samples
        through = total - float(passes.second[-1])
        path = through + 2 * self.hops * (message + devices.latency)
        flushed = through / (1 - (1 - 1 / m) ** d) if self.method.chunks == 1 else 0.0
        return (max(steady, path, flushed) + self.after(sums)) / self.samples

    @property
    def messages(self) -> int:
        """The most that a lane carries of a microbatch."""
        return 1 if self.method.folded else self.method.chunks

    @property
    def hops(self) -> int:
        """Borders of stages that lie between ranks."""
        return self.stages - 1 - self.method.folded

    def sums(self, parameters: float, bandwidth: float) -> tuple[float, float]:
        """Return the seconds of a sum of gradients over the replicas of a stage, and of a gather of its weights."""
        part = (self.width - 1) / self.width * parameters / bandwidth
        return (part if self.sharding == "gradients" else 2 * part), (0.0 if self.sharding == "none" else part)

    def after(self, sums: tuple[float, float]) -> float:
        """Return what of these no pass of the same rank can hide, if the method flushes."""
        return sum(sums) if self.method.chunks == 1 else sums[0]

    def __str__(self) -> str:
        """Return it in words."""
        size = f", microbatch {self.sized.samples}" if self.sized.samples > 1 else ""
        shards = "" if self.sharding == "none" else f", sharded {self.sharding}"
        return f"{self.method.name}, depth {self.depth}, width {self.width}{size}{shards}"
