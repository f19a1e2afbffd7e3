"""The links that the messages and sums of a run use: those between the devices that its ranks lie on.

Ranks lie on devices in the order of their numbers, so that those that follow each other are on one server; of devices
that differ each rank lies on the next one of its kind. A message takes the link of the innermost level that holds both
devices.

A sum over the replicas of a stage goes round them in the order of the pipelines, or level by level of the devices. A
reduce-scatter takes as long as an all-gather, and a sum as both. Around a ring of n devices each takes n - 1 steps, in
which every device sends the nth part of the bytes to the next one. Level by level the g devices of a server first
divide the bytes among them, then each divides its part with those of the s - 1 other servers that have the same, and
so on:

    ring            (n - 1) (l + P / (n B)), with the longest latency l and the slowest link B on its way
    hierarchical    (g - 1) (l + P / (g B)) within servers + (s - 1) (l' + P / (g s B')) between them

So the second never takes longer: with the same l and B everywhere both send as many bytes, in fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.stages.device_hierarchy import Devices
from penstock.schedule.ir.rank_numbers import RankNumbers
from penstock.schedule.machine.message_lanes import Latency

Places = npt.NDArray[np.int_]


class ScatterTime(NamedTuple):
    """Seconds of a reduce-scatter or an all-gather.

    Attributes:
        latency: whatever is sent.
        per_byte: more for each byte of all shards together.
    """

    latency: float
    per_byte: float

    def of(self, nbytes: float) -> float:
        """Return those of so many bytes."""
        return self.latency + nbytes * self.per_byte


def around_a_ring(members: int, latency: float, bandwidth: float) -> ScatterTime:
    """Return what it takes around a ring with this longest latency and slowest link."""
    return ScatterTime((members - 1) * latency, (members - 1) / members / bandwidth)


def level_by_level(devices: Devices, places: Places) -> ScatterTime | None:
    """Return what it takes level by level; None if servers hold different numbers of the replicas.

    Args:
        devices: in levels.
        places: the devices of the replicas.
    """
    parts, latency, per_byte, units = 1, 0.0, 0.0, places
    for level, of_level in zip(devices.levels, devices.latencies, strict=True):
        units, counts = np.unique(units // level.units, return_counts=True)
        members = int(counts[0])
        if (counts != members).any():
            return None
        parts *= members
        latency += (members - 1) * of_level
        per_byte += (members - 1) / parts / level.bandwidth
    return ScatterTime(latency, per_byte)


Floats = npt.NDArray[np.float64]
_KNOWN = 1 << 12  # links of runs that are kept


class RankLinks:
    """Bytes per second between ranks, and latencies; where pipelines differ, those of the slowest.

    Args:
        devices: in levels.
        numbers: of the ranks.
        kinds: of the device of each rank, by its number, where devices differ.
    """

    def __init__(self, devices: Devices, numbers: RankNumbers, kinds: Sequence[str] = ()) -> None:
        self._devices, self._numbers = devices, numbers
        places = np.arange(numbers.width * numbers.depth)
        if kinds:
            first = 0
            for kind in devices.kinds:
                own = np.array(kinds) == kind.name
                places[own] = first + np.arange(own.sum())
                first += kind.count
        self._places = places[np.array([numbers.of_pipeline(each) for each in range(numbers.width)])]

    def along(self, pairs: Sequence[tuple[int, int]]) -> Floats:
        """Return those between pairs of ranks of a pipeline."""
        ends = self._places[:, np.array(pairs, int).reshape(-1, 2)]
        slowest: Floats = self._between(ends[..., 0], ends[..., 1]).min(axis=0)
        return slowest

    def scatter(self, nbytes: float, stages: Sequence[Sequence[int]] = ()) -> float:
        """Return the seconds of a reduce-scatter, or an all-gather, of so many bytes over the replicas of any stage.

        Args:
            nbytes: of all shards together.
            stages: the ranks of a pipeline that hold each stage; one each if not given.
        """
        return max(each.of(nbytes) for each in (map(self._scatter_time, stages) if stages else self._scatters))

    @cached_property
    def _scatters(self) -> list[ScatterTime]:
        """What a reduce-scatter takes over the replicas of each rank's stage."""
        return [self._scatter_time([rank]) for rank in range(self._numbers.depth)]

    def _scatter_time(self, ranks: Sequence[int]) -> ScatterTime:
        places, devices = self._places[:, np.array(ranks, int)].reshape(-1), self._devices
        found = level_by_level(devices, places) if devices.collectives == "hierarchical" else None
        if found is not None:
            return found
        ring = places, np.roll(places, 1)
        latency, slowest = self._of_links(*ring, devices.latencies, 0.0).max(), self._between(*ring).min()
        return around_a_ring(len(places), float(latency), float(slowest))

    @cached_property
    def _ring(self) -> Floats:
        """Those from each rank to the next one, and from the last to the first."""
        return self.along([(rank, (rank + 1) % self._numbers.depth) for rank in range(self._numbers.depth)])

    def slowest(self, wraps: bool) -> float:
        """Return the slowest between ranks that follow each other in a pipeline, and with `wraps` last and first."""
        return float(self._ring.min() if wraps else self._ring[:-1].min(initial=np.inf))

    @cached_property
    def latencies(self) -> tuple[float, ...]:
        """Seconds that a message takes besides its bytes, between each rank of a pipeline and the next one."""
        between = self._of_links(self._places[:, :-1], self._places[:, 1:], self._devices.latencies, 0.0)
        return tuple(between.max(axis=0).tolist())

    @property
    def latency(self) -> Latency:
        """The same; a number if all are alike. Pipelines of one rank each send nothing, but decide together."""
        if self._places.size == 1:
            return 0.0
        if len(set(self._devices.latencies)) == 1:
            return self._devices.latencies[0]
        return self.latencies if len(set(self.latencies)) > 1 else max(self.latencies, default=0.0)

    @cached_property
    def decision(self) -> float | None:
        """Seconds of a decision of all ranks, as `Costs` has them: one is told over the slowest link, and answers."""
        latencies, size, taken = self._devices.latencies, 1, [0.0]
        for level, latency in zip(self._devices.levels, latencies, strict=True):
            below, size = np.unique(self._places // size), size * level.units
            if len(below) > len(np.unique(self._places // size)):
                taken.append(latency)
        return 2 * max(taken) if len(set(latencies)) > 1 else None

    def as_fast_as(self, other: RankLinks, wraps: bool) -> bool:
        """Return whether no link is slower than the same one of another order."""
        ring, others = (each._ring if wraps else each._ring[:-1] for each in (self, other))
        sooner = all(mine <= its for mine, its in zip(self.latencies, other.latencies, strict=True))
        return sooner and bool((ring >= others).all()) and self._sums_as_fast_as(other)

    def _sums_as_fast_as(self, other: RankLinks) -> bool:
        """Return whether sums of any size are."""
        pairs = zip(self._scatters, other._scatters, strict=True)
        return all(mine.latency <= its.latency and mine.per_byte <= its.per_byte for mine, its in pairs)

    def _between(self, ones: npt.NDArray[np.int_], others: npt.NDArray[np.int_]) -> Floats:
        """Return the bytes per second between devices; without end from one to itself."""
        return self._of_links(ones, others, [level.bandwidth for level in self._devices.levels], np.inf)

    def _of_links(
        self, ones: npt.NDArray[np.int_], others: npt.NDArray[np.int_], values: Sequence[float], own: float
    ) -> Floats:
        """Return those of the values of levels that hold between devices, and `own` from one to itself."""
        found, size = np.full(ones.shape, own), 1
        for level, value in zip(self._devices.levels, values, strict=True):
            apart = ones // size != others // size
            found[apart] = value
            size *= level.units
        return found


@lru_cache(_KNOWN)
def rank_links(devices: Devices, numbers: RankNumbers, kinds: tuple[str, ...] = ()) -> RankLinks:
    """Return the links of a run; arguments as of `RankLinks`."""
    return RankLinks(devices, numbers, kinds)
