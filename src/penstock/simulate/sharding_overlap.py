"""What a sharded schedule gathers and reduces, what it sends, and which part of the time for that is hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.schedule.ir.schedule import Op
from penstock.schedule.ir.sharding import Level
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.proof.proof import Proof
from penstock.schedule.proof.unsharded_peaks import RankShards
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_batch
from penstock.simulate.sharding_traffic import Network
from penstock.timeline import Interval, Timeline


@dataclass(frozen=True)
class ShardFigures:
    """What a sharded schedule gathers and reduces, and the time that it takes.

    Attributes:
        network: that carries it.
        ranks: what the proof derived of each rank.
        sent: per rank, the bytes sent for each batch, in gathers and in reductions; as many are received.
        layered: per rank, the bytes that a breadth-first order with as many places sends for each batch, with level
            full; 0 where stages have several copies in the pipeline.
        busy: per rank, the time that gathers and reductions take in this span.
        hidden: per rank, the part of that time during which the rank runs passes.
        exposed: by how much they lengthen this span: its last end less the one on a network without a limit.
        exposed_per_batch: by how much they lengthen each batch of a long run.
    """

    network: Network
    ranks: tuple[RankShards, ...]
    sent: tuple[Mapping[str, float], ...]
    layered: tuple[float, ...]
    busy: tuple[float, ...]
    hidden: tuple[float, ...]
    exposed: float
    exposed_per_batch: float

    def per_rank(self) -> dict[str, Sequence[float]]:
        """Return the figures by name, those of each rank in a row; the two of `exposed` are those of all ranks."""
        weights, gradients = self.network.weight_bytes, self.network.gradient_bytes
        return {
            "gathers": [r.gathers for r in self.ranks],
            "reductions": [r.reductions for r in self.ranks],
            "bytes_gathered": [each["gathers"] for each in self.sent],
            "bytes_reduced": [each["reductions"] for each in self.sent],
            "bytes_sent": [sum(each.values()) for each in self.sent],
            "bytes_of_layered": self.layered,
            "gathered_at_once": [r.gathered for r in self.ranks],
            "gathered_bytes": [r.gathered * self.network.parameters * weights for r in self.ranks],
            "gradients_at_once": [r.gradients for r in self.ranks],
            "gradient_bytes": [r.gradients * self.network.parameters * gradients for r in self.ranks],
            "network_time": self.busy,
            "hidden": self.hidden,
            "exposed": [self.exposed],
            "exposed_per_batch": [self.exposed_per_batch],
        }


Play = Callable[[Lowered, Costs, int], Timeline]


def shard_figures(
    proof: Proof, lowered: Lowered, costs: Costs, batches: int, timeline: Timeline, play: Play
) -> ShardFigures | None:
    """Return the figures of a span of a sharded schedule; None where the costs have no network.

    Args:
        proof: of the schedule.
        lowered: the schedule with its messages, as it was played.
        costs: with which.
        batches: the length of the span.
        timeline: of the span.
        play: makes a timeline of other costs.
    """
    network = costs.network
    if network is None:
        return None
    unlimited = replace(costs, network=replace(network, bandwidth=math.inf))
    free = play(lowered, unlimited, batches)
    ranks = range(timeline.ranks)
    lanes = [[i for i in timeline.intervals if i.rank == r and i.what in (Op.GATHER, Op.REDUCE)] for r in ranks]
    work = [sorted((i.start, i.end) for i in timeline.work() if i.rank == r) for r in ranks]
    steady = [steady_batch(lowered, each, proof.steady_from + 2).time for each in (costs, unlimited)]
    return ShardFigures(
        network,
        proof.shards,
        tuple(MappingProxyType(network.per_batch(rank)) for rank in ranks),
        tuple(_layered(proof, network, rank) for rank in ranks),
        tuple(sum(i.end - i.start for i in lane) for lane in lanes),
        tuple(_overlap(lane, here) for lane, here in zip(lanes, work, strict=True)),
        _end(timeline) - _end(free),
        max(steady[0] - steady[1], 0.0),
    )


def _end(timeline: Timeline) -> float:
    return max((i.end for i in timeline.work()), default=0.0)


def _layered(proof: Proof, network: Network, rank: int) -> float:
    """Bytes that a breadth-first order sends: it gathers each stage for forwards, and all but the last k again."""
    schedule, places = proof.schedule, proof.schedule.sharding.weights
    held = [stage for stage in schedule.on_rank(rank) if stage.index not in schedule.frozen]
    if schedule.sharding.level is not Level.FULL or places is None or schedule.directions > 1:
        return 0.0
    gather, reduce = (network.sent_for(op, held[0]) if held else 0.0 for op in (Op.GATHER, Op.REDUCE))
    return max(2 * len(held) - places, len(held)) * gather + len(held) * reduce


def _overlap(lane: Sequence[Interval], work: Sequence[tuple[float, float]]) -> float:
    """Return for how long a rank runs passes while its network is busy."""
    total, place = 0.0, 0
    for interval in sorted(lane, key=lambda i: i.start):
        while place < len(work) and work[place][1] <= interval.start:
            place += 1
        for start, end in work[place:]:
            if start >= interval.end:
                break
            total += max(min(end, interval.end) - max(start, interval.start), 0.0)
    return total
