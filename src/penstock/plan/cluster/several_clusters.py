"""Devices of several clusters as those of one."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.plan.cluster.schema import Cluster, Sourced
from penstock.plan.stages.device_hierarchy import DeviceKind, DeviceLevel, Devices


def devices_of_clusters(clusters: Sequence[Cluster], counts: Sequence[int]) -> Devices:
    """Return so many devices of each of several clusters, for planners that know devices which differ.

    Links are as fast as the slowest of their kind; where nodes have different sizes, all are as those between them.
    Sums go around rings unless all clusters say otherwise.

    Args:
        clusters: the first one has the devices that were profiled; others are as fast as their operations say.
        counts: devices of each.

    Raises:
        ConfigError: there are no whole nodes, or two clusters have one name.
    """
    parts = [cluster.devices(count) for cluster, count in zip(clusters, counts, strict=True)]
    if len(parts) == 1:
        return parts[0]
    (inner, *others), total = sorted({part.levels[0].units for part in parts}), sum(counts)
    between = min(cluster.between.value for cluster in clusters) / 2
    slow = _longest([cluster.between_latency for cluster in clusters])
    levels = [DeviceLevel(total, between, slow)]
    if not others and inner > 1:
        inside = min(cluster.inside.value for cluster in clusters) / 2
        near = _longest([cluster.inside_latency for cluster in clusters])
        levels = [DeviceLevel(inner, inside, near), DeviceLevel(total // inner, between, slow)]
    kinds = [
        DeviceKind(cluster.name, count, cluster.rate / clusters[0].rate, cluster.memory.value)
        for cluster, count in zip(clusters, counts, strict=True)
    ]
    memory, collectives = max(cluster.memory.value for cluster in clusters), {each.collectives for each in clusters}
    return Devices(
        tuple(levels), memory, collectives="ring" if len(collectives) > 1 else collectives.pop(), kinds=tuple(kinds)
    )


def _longest(latencies: Sequence[Sourced | None]) -> float | None:
    """Return the longest latency of some clusters; None if none says one."""
    return max((each.value for each in latencies if each is not None), default=None)
