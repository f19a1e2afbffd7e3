"""The schema of cluster files: equal devices in nodes; every number says where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.checks import check_whole
from penstock.errors import ConfigError
from penstock.plan.profile.schema import MOST_DEVICES
from penstock.plan.stages.device_hierarchy import Collectives, DeviceKind, DeviceLevel, Devices

FORMAT: Literal["penstock cluster 1"] = "penstock cluster 1"
LINKS = ("inside", "between", "host", "disk")
"""Links of a device: to others of its node, to other nodes, to the memory of its host, to storage."""


class ClusterPart(BaseModel):
    """No unknown keys, and no text that is read as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sourced(ClusterPart):
    """A number and where it is from.

    Attributes:
        value: the number.
        source: a data sheet, a paper, a measurement, or "assumed".
    """

    value: Annotated[float, Field(gt=0, le=1e30)]
    source: Annotated[str, Field(min_length=1, max_length=500)]


class Cluster(ClusterPart):
    """A cluster file. Bandwidths are those of one device, in bytes per second, both directions added up.

    Attributes:
        format: says what the file is.
        name: of the cluster.
        node: how many devices share the fast links of a node.
        nodes: how many nodes there are, for plans that are not told of how many devices; None if that is open.
        adapters: of a node to others: 1, which all of its devices share, or one for each if not given.
        collectives: how sums and gathers over several nodes go, as `Devices` has it.
        precision: what passes compute in.
        flops: floating-point operations per second of a device, dense matrix products in that precision.
        memory: bytes of a device.
        inside, between: to other devices of the node, and of other nodes.
        inside_latency, between_latency: seconds that a message takes there besides its bytes; none if not given.
        host, disk: to the memory of the host, and to storage; None if there is none.
        memory_bandwidth: bytes per second of the device's own memory.
        efficiency: the share of `flops` that training on one device reaches; all of it if not given.
        price: of a device for an hour, in any currency.
    """

    format: Literal["penstock cluster 1"]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    node: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    nodes: Annotated[int, Field(ge=1, le=MOST_DEVICES)] | None = None
    adapters: Literal[1] | None = None
    collectives: Collectives = "ring"
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    flops: Sourced
    memory: Sourced
    inside: Sourced
    between: Sourced
    inside_latency: Sourced | None = None
    between_latency: Sourced | None = None
    host: Sourced | None = None
    disk: Sourced | None = None
    memory_bandwidth: Sourced | None = None
    efficiency: Sourced | None = None
    price: Sourced | None = None

    @property
    def rate(self) -> float:
        """Operations per second that a device reaches when nothing else holds it up."""
        return self.flops.value * (1.0 if self.efficiency is None else self.efficiency.value)

    def threshold(self, link: str) -> float | None:
        """Return the operations per byte with which a transfer takes as long as the work that hides it.

        Args:
            link: one of `LINKS`; None is returned if the cluster has no such link.
        """
        bandwidth: Sourced | None = getattr(self, link)
        return None if bandwidth is None else self.rate / bandwidth.value

    def devices(self, count: int) -> Devices:
        """Return so many of its devices, for planners, which count bandwidths of one direction.

        Raises:
            ConfigError: there are no whole nodes.
        """
        check_whole("devices", count, 1, MOST_DEVICES)
        inner = min(count, self.node)
        if count % inner:
            fewer = count - count % inner
            raise ConfigError(
                f"{count} devices are no whole nodes of {self.node} of {self.name}; take {fewer} or {fewer + inner}: "
                "plans leave out devices that they have no use for, and then say how many processes each node has"
            )
        levels = [DeviceLevel(inner, self.inside.value / 2, _value(self.inside_latency))]
        if count > inner:
            levels.append(DeviceLevel(count // inner, self.between.value / 2, _value(self.between_latency)))
        host = None if self.host is None else self.host.value / 2
        shares = self.adapters is not None and count > inner > 1
        return Devices(tuple(levels), self.memory.value, host=host, shares_link=shares, collectives=self.collectives)


def _value(number: Sourced | None) -> float | None:
    return None if number is None else number.value


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
