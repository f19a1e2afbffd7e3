"""The links that the messages and sums of a run use: those between the devices that its ranks lie on.

Ranks lie on devices in the order of their numbers, so that those that follow each other are on one server; of devices
that differ each rank lies on the next one of its kind. A message takes the link of the innermost level that holds both
devices, and a sum over the replicas of a stage goes round them in the order of the pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from penstock.plan.stages.device_hierarchy import Devices
from penstock.schedule.ir.rank_numbers import RankNumbers

Floats = npt.NDArray[np.float64]
_KNOWN = 1 << 12  # links of runs that are kept


class RankLinks:
    """Bytes per second between ranks; where pipelines differ, those of the slowest.

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

    def around(self, ranks: Sequence[int]) -> float:
        """Return that of a sum over some ranks of each pipeline, which hold the same stage; without end for one."""
        places = self._places[:, np.array(ranks, int)].reshape(-1)
        return float(self._between(places, np.roll(places, 1)).min())

    @cached_property
    def across(self) -> float:
        """That of sums over the replicas of any stage, which is held by one rank of each pipeline."""
        return float(self._between(self._places, np.roll(self._places, 1, axis=0)).min())

    @cached_property
    def _ring(self) -> Floats:
        """Those from each rank to the next one, and from the last to the first."""
        return self.along([(rank, (rank + 1) % self._numbers.depth) for rank in range(self._numbers.depth)])

    def slowest(self, wraps: bool) -> float:
        """Return the slowest between ranks that follow each other in a pipeline, and with `wraps` last and first."""
        return float(self._ring.min() if wraps else self._ring[:-1].min(initial=np.inf))

    def as_fast_as(self, other: RankLinks, wraps: bool) -> bool:
        """Return whether no link is slower than the same one of another order."""
        ring, others = (each._ring if wraps else each._ring[:-1] for each in (self, other))
        return self.across >= other.across and bool((ring >= others).all())

    def _between(self, ones: npt.NDArray[np.int_], others: npt.NDArray[np.int_]) -> Floats:
        """Return the bytes per second between devices; without end from one to itself."""
        found, size = np.full(ones.shape, np.inf), 1
        for level in self._devices.levels:
            apart = ones // size != others // size
            found[apart] = level.bandwidth
            size *= level.units
        return found


@lru_cache(_KNOWN)
def rank_links(devices: Devices, numbers: RankNumbers, kinds: tuple[str, ...] = ()) -> RankLinks:
    """Return the links of a run; arguments as of `RankLinks`."""
    return RankLinks(devices, numbers, kinds)
