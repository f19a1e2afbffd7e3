"""A configuration before it is cut into stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from penstock.plan.candidates.block_chain import BlockChain, Floats, PassSums
from penstock.plan.candidates.device_choice import Placement
from penstock.plan.candidates.planned_methods import PlannedMethod
from penstock.plan.candidates.schedule_cache import ScheduleKey
from penstock.plan.cluster.rank_links import RankLinks, around_a_ring, rank_links
from penstock.plan.planners.two_bw import Sized
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Skipped
from penstock.schedule.ir.rank_numbers import RankNumbers, RankOrder
from penstock.schedule.machine.message_lanes import Latency, latency_between
from penstock.simulate.memory.held import HeldKind

_MANY = 1 << 13  # forwards of a batch of a pipeline that are all played
_ROUNDS = 3  # that come before every round takes the same time; if they do not, it is noticed


@dataclass(frozen=True)
class Candidate:
    """A configuration before it is cut into stages.

    Attributes:
        sized: the graph at a microbatch size.
        method: with the options of its order.
        depth, width: ranks of a pipeline, and pipelines.
        sharding: what pipelines divide of the state of stages: "none", "optimizer", "gradients" or "full".
        away: optimizer states are in the memory of the host, but for those of a few parameters during an update.
        on: the devices of ranks, where not all devices are alike.
        rank_order: in which ranks lie on devices.
        offloads: activations of ranks that have no room for them are in the memory of the host, where that helps.
    """

    sized: Sized
    method: PlannedMethod
    depth: int
    width: int
    sharding: str = "none"
    away: bool = False
    on: Placement = ()
    rank_order: RankOrder = "tp-pp-dp"
    offloads: bool = False

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
        """What its schedule is known by: that with the fewest microbatches of those that are played."""
        return ScheduleKey(self.method, self.depth, self.played[0], self.width > 1, self.sharding)

    @property
    def played(self) -> tuple[int, ...]:
        """The microbatches of batches that are played: all of them, or of more than can be three smaller numbers.

        What a rank holds is the same then, and each further round of microbatches takes as long as the one before.
        """
        m, rounds = self.microbatches, 2 * self.depth  # as groups of `depth` are, and what alternates
        first = m % rounds + (self.depth if self.method.row == "interleaved" else 0) // 2 * rounds + _ROUNDS * rounds
        if self.passes <= _MANY or self.method.grows or m <= first + 2 * rounds:
            return (m,)
        return first, first + rounds, first + 2 * rounds

    @cached_property
    def speeds(self) -> Floats:
        """How many times as fast as the profile each rank is."""
        return np.array([each.speed for each in self.on]) if self.on else np.ones(self.depth)

    def cores(self, devices: Devices) -> float:
        """Return how many cores the ranks of a pipeline share, as its replicas are in step; infinite if none do."""
        return math.inf if devices.cores is None else devices.cores / self.width

    def limits(self, devices: Devices) -> list[float]:
        """Return the bytes that each rank may hold."""
        limits = [each.memory for each in self.on] or [devices.memory] * self.depth
        return [math.inf if limit is None else limit for limit in limits]

    @property
    def placement(self) -> tuple[str, ...]:
        """The kind of the device of each rank, by its number; empty if all devices are alike."""
        places = map(self._numbers.place, range(self.width * self.depth)) if self.on else ()
        return tuple(self.on[rank].kinds[pipeline] for pipeline, rank in places)

    @property
    def _numbers(self) -> RankNumbers:
        return RankNumbers(self.width, self.depth, self.rank_order)

    @property
    def wraps(self) -> bool:
        """Whether messages go from the last rank to the first."""
        return self.method.chunks > 1 and not self.method.folded

    def links(self, devices: Devices) -> RankLinks:
        """Return the links of its messages and sums."""
        return rank_links(devices, self._numbers, self.placement)

    def bandwidth(self, devices: Devices) -> float:
        """Return the least bandwidth between ranks."""
        return devices.bandwidth if len(devices.levels) == 1 else self.links(devices).slowest(self.wraps)

    def scatter(self, parameters: float, devices: Devices) -> float:
        """Return the seconds of a reduce-scatter, or an all-gather, of the bytes of a stage over its replicas."""
        if len(devices.levels) == 1:
            return around_a_ring(self.width, devices.latencies[0], devices.bandwidth).of(parameters)
        return self.links(devices).scatter(parameters)

    def latency(self, devices: Devices) -> Latency:
        """Return the seconds that messages take besides their bytes, as `Costs` has them."""
        if self.width * self.depth == 1:
            return 0.0
        if len(set(devices.latencies)) == 1:
            return devices.latencies[0]
        return self.links(devices).latency

    def decision(self, devices: Devices) -> float | None:
        """Return the seconds of a decision of all stages, as `Costs` has them."""
        return None if len(set(devices.latencies)) == 1 else self.links(devices).decision

    def hop_latencies(self, devices: Devices) -> Floats:
        """Return the same of each border of stages that lies between ranks, from the first one on."""
        if self.depth == 1:
            return np.zeros(0)
        latency, ranks = self.latency(devices), self.method.ranks(self.depth)
        return np.array([latency_between(latency, a, b) for a, b in pairwise(ranks) if a != b])

    def passes_of(self, chain: BlockChain) -> PassSums:
        """Return what passes of its method take.

        Raises:
            ValueError: the halves of backwards are unknown.
        """
        found = chain.halved if self.method.halved else chain.passes
        if found is None:
            raise ValueError("the profile does not tell the halves of backwards apart")
        return found

    def updates(self, chain: BlockChain, devices: Devices) -> Floats:
        """Return the seconds of updates of the first 0, 1, .. blocks.

        Optimizer states that are away come and go one after the other, and no pass is known to hide that.
        """
        steps = chain.steps
        if self.away:
            assert devices.host is not None, "no bandwidth to the host is known"
            steps = steps + 2 * chain.sizes[HeldKind.OPTIMIZER][0] / devices.host
        return steps / self.shards

    @property
    def messages(self) -> int:
        """The most that a lane carries of a microbatch."""
        return 1 if self.method.folded else self.method.chunks

    @property
    def hops(self) -> int:
        """Borders of stages that lie between ranks."""
        return self.stages - 1 - self.method.folded if self.depth > 1 else 0

    def sums(self, parameters: float, devices: Devices) -> tuple[float, float]:
        """Return the seconds of a sum of gradients over the replicas of a stage, and of a gather of its weights."""
        part = self.scatter(parameters, devices)
        reduced = part if self.sharding in ("gradients", "full") else 2 * part
        return reduced, (0.0 if self.sharding == "none" else part)

    def after(self, sums: tuple[float, float]) -> float:
        """Return what of these no pass of the same rank can hide; without a flush, what they take of their lane."""
        if not self.method.flushes:
            return max(sums)
        return sum(sums) if self.method.chunks == 1 else sums[0]

    def __str__(self) -> str:
        size = f", microbatch {self.sized.samples}" if self.sized.samples > 1 else ""
        shards = "" if self.sharding == "none" else f", sharded {self.sharding}"
        away = ", optimizer on the host" * self.away + ", activations on the host" * self.offloads
        order = "" if self.rank_order == "tp-pp-dp" else f", {self.rank_order}"
        limit = dict(self.method.searched).get("limit")
        name = self.method.name if limit is None else f"{self.method.name}, limit {limit}"
        of = f"{name}, depth {self.depth}, width {self.width}"
        return f"{of}{size}{shards}{away}{order}{self._said_of_devices}"

    @property
    def _said_of_devices(self) -> str:
        rows = [(name, len(list(row))) for name, row in groupby(map(str, self.on))]
        return ", on " * bool(rows) + ", ".join(name if n == 1 else f"{n} x {name}" for name, n in rows)


class NoPlanError(Exception):
    """There is no plan of a candidate, or none that is fast enough.

    Attributes:
        skipped: what is left out, and why.
        refused: there is no schedule, whatever its ranks hold and how long they take.

    Args:
        of: the candidate.
        why: there is none.
        refused: as the attribute.
    """

    def __init__(self, of: Candidate, why: str, refused: bool = False) -> None:
        super().__init__(why)
        self.skipped, self.refused = Skipped(str(of), why), refused
