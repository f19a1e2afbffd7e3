"""What a rank's own work takes in a batch: the typical time of each kind, and the least that a batch can take."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.timeline import Interval


@dataclass(frozen=True)
class OwnWork:
    """The passes and updates of a rank, as they were measured.

    Attributes:
        passes: for each kind of work in a batch, how many there are and the seconds of one: the median on its stage, of
            several stages their mean.
        fastest: seconds of a batch in which every pass and update is as fast as the fastest of its kind on its stage.
    """

    passes: Mapping[str, tuple[int, float]]
    fastest: float

    @property
    def busy(self) -> float:
        """Seconds of a batch whose passes and updates all take their median."""
        return sum(count * seconds for count, seconds in self.passes.values())


def own_work(intervals: Iterable[Interval], rank: int, batches: range) -> OwnWork:
    """Return what the work of a rank takes; neither that of other ranks counts nor any wait.

    On a machine with other processes almost every batch has a pass that was interrupted, so that even the median of
    whole batches is far too long. The fastest of many alike passes was not interrupted.

    Args:
        intervals: of a timeline.
        rank: of which.
        batches: that count.
    """
    times: dict[tuple[str, int, int], list[float]] = {}
    for each in intervals:
        if each.is_work and each.rank == rank and each.batch in batches:
            times.setdefault((each.what, each.stage, each.direction), []).append(each.end - each.start)
    kinds: dict[str, list[float]] = {}
    for (what, _, _), found in sorted(times.items()):
        kinds.setdefault(what, []).extend([statistics.median(found)] * len(found))
    passes = {what: (round(len(found) / len(batches)), statistics.mean(found)) for what, found in kinds.items()}
    return OwnWork(passes, sum(len(found) / len(batches) * min(found) for found in times.values()))
