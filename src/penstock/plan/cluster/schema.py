"""The schema of cluster files: equal devices in nodes; every number says where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.checks import check_whole, did_you_mean, in_short, in_words
from penstock.errors import ConfigError
from penstock.guarded_files import read_given
from penstock.plan.profile.schema import MOST_DEVICES
from penstock.plan.stages.device_hierarchy import Collectives, DeviceKind, DeviceLevel, Devices
from penstock.yaml_file import numbers_in, parse_yaml

FORMAT: Literal["penstock cluster 1"] = "penstock cluster 1"
LINKS = ("inside", "between", "host", "disk")
"""Links of a device: to others of its node, to other nodes, to the memory of its host, to storage."""
Part = TypeVar("Part", bound=BaseModel)
THIS_MACHINE = "this-machine"
"""The name of the machine at hand, which commands measure (`penstock.measure.this_machine`)."""
_PRESETS = "presets.yaml"
_MOST_BYTES = 1 << 20
_TEXTS = ("format", "name", "source")  # keys whose values are no numbers
_MOST_FAULTS = 8  # that a message lists


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


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(_presets()))


@cache
def _presets() -> dict[str, Any]:
    return parse_yaml(files("penstock.plan.cluster").joinpath(_PRESETS).read_text(), _PRESETS)


def find_cluster(name: str) -> Cluster:
    """Return a preset by its name, or a cluster from a file.

    Raises:
        ConfigError: there is neither, or the file is no cluster.
    """
    presets = _presets()
    if name in presets:
        return validated(Cluster, {"format": FORMAT, "name": name, **presets[name]}, name, "cluster")
    if not Path(name).suffix and not Path(name).exists():
        known = [*sorted(presets), THIS_MACHINE]
        raise ConfigError(f"cluster must be {in_words(known)}, or a file, got {name!r:.80}.{did_you_mean(name, known)}")
    return parsed(Cluster, text_of(Path(name), "cluster"), name, "cluster")


def text_of(path: Path, what: str) -> str:
    """Read the text of a file that describes something.

    Raises:
        ConfigError: it cannot be read, is too large or no text.
    """
    try:
        return read_given(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error}") from None


def parsed(schema: type[Part], text: str, name: str, what: str) -> Part:
    """Parse a file by its schema.

    Args:
        schema: what it must be.
        text: what it holds.
        name: of the file, for messages.
        what: it is, for messages.

    Raises:
        ConfigError: it is something else; the message lists what is wrong and where.
    """
    return validated(schema, numbers_in(parse_yaml(text, name), _TEXTS), name, what)


def validated(schema: type[Part], values: object, name: str, what: str) -> Part:
    """Check values by their schema; arguments and errors as of `parsed`."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg'][:1].lower()}{each['msg'][1:]}, "
            f"got {in_short(each['input'], 60)}"
            for each in error.errors(include_url=False, include_context=False)[:_MOST_FAULTS]
        ]
        raise ConfigError(f"{name!r} is no {what}:\n" + "\n".join(faults)) from None
