"""A configuration before it is cut into stages, and the least that it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.candidates.block_chain import BlockChain, Floats, PassSums
from penstock.plan.candidates.device_choice import Placement
from penstock.plan.candidates.planned_methods import PlannedMethod, stage_forecast
from penstock.plan.candidates.schedule_cache import ScheduleKey
from penstock.plan.cluster.rank_links import RankLinks, rank_links
from penstock.plan.planners.two_bw import Sized
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.planned import Skipped
from penstock.schedule.ir.rank_numbers import RANK_ORDERS, RankNumbers, RankOrder
from penstock.simulate.memory.held import HeldKind

_MANY = 1 << 13  # forwards of a batch of a pipeline that are all played
_ROUNDS = 3  # that come before every round takes the same time; if they do not, it is noticed
_GATHERED = 2  # stages of a rank that are whole at once, where weights are divided


class RankWork(NamedTuple):
    """Seconds of ranks: numbers for each, or matrices from cut to cut.

    Attributes:
        busy: of a microbatch, all passes.
        path: the part of them that other stages wait for.
        forward: of the forward of its first stage.
        step: of an update.
        before: from the begin of a batch to its first forward, and from its last backward to the end.
        through: from a forward of its first stage to the end of the backward of the same microbatch.
        behind: from a forward of its last stage to the backward of the same microbatch.
    """

    busy: Floats
    path: Floats
    forward: Floats
    step: Floats
    before: Floats
    through: Floats
    behind: Floats


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

    def bandwidths(self, devices: Devices) -> tuple[float, float]:
        """Return the bandwidth between replicas and the least one between ranks."""
        if len(devices.levels) == 1:
            return devices.bandwidth, devices.bandwidth
        links = self.links(devices)
        return links.across, links.slowest(self.wraps)

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

    def bound(self, chain: BlockChain, devices: Devices) -> float:
        """Return the seconds per sample that it takes at least, however it is cut.

        A rank is busy for m microbatches and an update, and a lane of messages for m of these, or more if a rank has
        several stages. With a flush the batch begins once the forwards of the stages before have run, and ends with
        their backwards, of halved ones the first halves; then come the sums of gradients. So with one stage on each
        rank, if T is the time of the batch without these and t_i that of what others wait for in a stage,
        m t_s + sum of t_i before s <= T for every stage, hence T (1 - (1 - 1/m)^d) is at least the sum of all t. In any
        case every stage has a block, so that at least r of them come before rank r, as `of_ranks` says.
        """
        m, d, passes = self.microbatches, self.depth, self.passes_of(chain)
        together, fastest = float(self.speeds.sum()), float(self.speeds.max())
        total, message = float(passes.busy[-1]), self.least_message(chain, devices)
        longest = least_of_largest(np.diff(passes.busy), d) / fastest
        busy = max((m * total + float(self.updates(chain, devices)[-1])) / together, m * longest)
        steady = max(busy, m * self.messages * message, self.least_collectives(chain, devices))
        after = self.least_after(chain, devices)
        if not self.method.flushes:
            return max(steady, after) / self.samples
        through = (total - float(passes.second[-1])) / fastest
        path = through + 2 * self.hops * (message + devices.latency)
        flushed = through / (1 - (1 - 1 / m) ** d) if self.method.chunks == 1 else 0.0
        hops = (message + devices.latency) * (d - 1)
        outside = float(passes.path[:d].mean()) / fastest + hops
        if self.method.forwards_first:
            outside += float((passes.path[-1] - passes.path[-d:]).mean()) / fastest + hops
        return (max(steady, path, flushed, m * through / d + outside) + after) / self.samples

    def least_after(self, chain: BlockChain, devices: Devices) -> float:
        """Return the seconds that sums and gathers take at least, however it is cut, as `after` counts them."""
        return self.after(self._least_sums(chain, devices))

    def least_collectives(self, chain: BlockChain, devices: Devices) -> float:
        """Return the seconds that gathers and sums of fully sharded stages take of a rank's lane at least.

        Forwards gather each stage; backwards, too, but for those that are still there where all forwards come first.
        """
        if self.sharding != "full":
            return 0.0
        reduced, gathered = self._least_sums(chain, devices)
        v = self.method.chunks
        return v * reduced + (max(2 * v - _GATHERED, v) if self.method.flushes else v) * gathered

    def _least_sums(self, chain: BlockChain, devices: Devices) -> tuple[float, float]:
        """Return what `sums` says of a stage of average size."""
        across, _ = self.bandwidths(devices)
        return self.sums(float(chain.parameters[0, -1]) / self.stages, across)

    def least_message(self, chain: BlockChain, devices: Devices) -> float:
        """Return the seconds that a message between ranks takes of its lane at least, however it is cut."""
        _, along = self.bandwidths(devices)
        return float(chain.crossing[1:-1].min(initial=math.inf)) / along if self.depth > 1 else 0.0

    def least_hop(self, chain: BlockChain, devices: Devices) -> float:
        """Return the seconds from the end of a pass to the next rank at least, in any order of ranks."""
        orders = RANK_ORDERS if len(devices.levels) > 1 else (self.rank_order,)
        return min(replace(self, rank_order=each).least_message(chain, devices) for each in orders) + devices.latency

    def of_ranks(self, times: RankWork, ranks: npt.NDArray[np.intp]) -> Floats:
        """Return the seconds that a batch takes at least without sums, as far as each rank shows.

        It is busy for m microbatches and an update. With a flush others run before the rank begins and after it has
        ended; where all forwards come first, also between its forwards and its backwards. Otherwise, with n
        microbatches in flight, a forward comes after the backward of the nth one before it, with or without a flush.

        Args:
            times: of ranks.
            ranks: their numbers, in the first dimension.
        """
        m, method = self.microbatches, self.method
        busy: Floats = m * times.busy + times.step
        if method.forwards_first:
            return np.maximum(busy, times.before + m * times.path + times.behind)
        if self.only_busy:
            return busy
        flight = np.full(len(ranks), m)
        if method.chunks == 1 and not method.halved:
            flight = np.array([stage_forecast(method, self.depth, m, rank).activations for rank in ranks.tolist()])
        flight = flight.reshape(-1, *[1] * (times.busy.ndim - 1))
        if not method.flushes:  # in the long run; whole rounds of what is in flight, so that two batches show it
            return np.maximum(busy, 2 * m // flight * times.through / 2)
        rounds, rest = np.divmod(m - 1, flight)
        own = np.maximum(m * times.path, rest * times.forward + (rounds + 1) * times.through)
        return np.maximum(busy, times.before + own)

    @property
    def only_busy(self) -> bool:
        """Whether `of_ranks` counts passes and updates alone.

        Of so many microbatches in flight the batches that are simulated may show fewer rounds.
        """
        return not self.method.flushes and (self.method.chunks > 1 or self.method.drifts)

    @property
    def messages(self) -> int:
        """The most that a lane carries of a microbatch."""
        return 1 if self.method.folded else self.method.chunks

    @property
    def hops(self) -> int:
        """Borders of stages that lie between ranks."""
        return self.stages - 1 - self.method.folded if self.depth > 1 else 0

    def sums(self, parameters: float, bandwidth: float) -> tuple[float, float]:
        """Return the seconds of a sum of gradients over the replicas of a stage, and of a gather of its weights."""
        part = (self.width - 1) / self.width * parameters / bandwidth
        reduced = part if self.sharding in ("gradients", "full") else 2 * part
        return reduced, (0.0 if self.sharding == "none" else part)

    def after(self, sums: tuple[float, float]) -> float:
        """Return what of these no pass of the same rank can hide; without a flush, what they take of their lane."""
        if not self.method.flushes:
            return max(sums)
        return sum(sums) if self.method.chunks == 1 else sums[0]

    def __str__(self) -> str:
        """Return it in words."""
        size = f", microbatch {self.sized.samples}" if self.sized.samples > 1 else ""
        shards = "" if self.sharding == "none" else f", sharded {self.sharding}"
        away = ", optimizer on the host" * self.away + ", activations on the host" * self.offloads
        order = "" if self.rank_order == "tp-pp-dp" else f", {self.rank_order}"
        of = f"{self.method.name}, depth {self.depth}, width {self.width}"
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


def least_of_largest(times: Floats, ranks: int) -> float:
    """Return the time of the busiest of some ranks at least, however these blocks are divided among them.

    Of the k ranks + 1 longest blocks some rank has k + 1, which take as long as the shortest of these, or longer.
    """
    down = -np.sort(-times)
    return max(float(down[k * ranks - k : k * ranks + 1].sum()) for k in range((len(times) - 1) // ranks + 1))
