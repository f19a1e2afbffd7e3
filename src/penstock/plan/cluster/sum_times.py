"""What sums and gathers over the replicas of a stage take: around a ring, or level by level of the devices.

A reduce-scatter takes as long as an all-gather, and a sum as both. Around a ring of n devices each takes n - 1 steps,
in which every device sends the nth part of the bytes to the next one. Level by level the g devices of a server first
divide the bytes among them, then each divides its part with those of the s - 1 other servers that have the same, and
so on:

    ring            (n - 1) (l + P / (n B)), with the longest latency l and the slowest link B on its way
    hierarchical    (g - 1) (l + P / (g B)) within servers + (s - 1) (l' + P / (g s B')) between them

So the second never takes longer: with the same l and B everywhere both send as many bytes, in fewer steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.stages.device_hierarchy import Devices

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
