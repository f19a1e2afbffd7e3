"""The devices and links that `penstock plan` is asked to plan for, and their price."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.byte_sizes import size_of
from penstock.cli.options import whole_numbers
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.plan.cluster.schema import Cluster

_Value = TypeVar("_Value")


def cluster_named(name: str, measured: bool = True) -> Cluster:
    """Return a preset, a cluster from a file, or the machine at hand, which is measured.

    Args:
        name: of the cluster.
        measured: or else the machine at hand has speeds of no meaning, with which all else can be checked before.

    Raises:
        ConfigError: there is no such preset, or the file is no cluster.
    """
    from penstock.plan.cluster.files import THIS_MACHINE, find_cluster

    if name != THIS_MACHINE:
        return find_cluster(name)
    from penstock.measure.this_machine import this_machine, unmeasured_machine

    return this_machine() if measured else unmeasured_machine()


def clusters_of(names: str | None, measured: bool = True) -> list[Cluster]:
    """Return the clusters that are named with commas between them; none if none is named; `measured` as above.

    Raises:
        ConfigError: as of `cluster_named`.
    """
    listed = [] if names is None else [name.strip() for name in names.split(",")]
    found = {name: cluster_named(name, measured) for name in listed}
    return [found[name] for name in listed]


def price_of(price: float | None, clusters: Sequence[Cluster], objective: str) -> float | None:
    """Return the price of a device for an hour: the one that is given or, for the cheapest plan, that of the clusters.

    Raises:
        ConfigError: clusters have different prices, or only some of them one.
    """
    if price is not None or objective != "cost":
        return price
    known = {None if cluster.price is None else cluster.price.value for cluster in clusters}
    if len(known) > 1:
        raise ConfigError("the clusters have different prices of a device; give one for all of them: --price")
    return next(iter(known), None)


def link_matrix_of(path: Path | None, planner: str) -> Any:
    """Read the bandwidths between all pairs of devices; None if no file has them.

    Raises:
        ConfigError: it cannot be read, is none, or no planner takes it.
    """
    from penstock.plan.planners.spp import checked_links
    from penstock.yaml_file import numbers_in, read_yaml

    if path is None:
        return None
    if planner != "spp":
        raise ConfigError("--link-matrix is for --planner spp; others know levels of devices (--devices, --bandwidth)")
    return checked_links(numbers_in(read_yaml(path).get("links")))


def devices_of(
    clusters: Sequence[Cluster],
    devices: str | None,
    bandwidth: str | None,
    memory: str | None,
    profile: Any,
    with_links: bool = False,
    speed: str | None = None,
) -> Any:
    """Return the devices of clusters, or those that options describe: ranks of the profiled machine, if no links do.

    Raises:
        ConfigError: they cannot be read, or do not fit together.
    """
    devices = device_counts(devices, clusters)
    if not clusters:
        if with_links and bandwidth is None:
            bandwidth = "1GB"  # not used
        found, counts = _devices(devices, bandwidth, profile.links)
        if bandwidth is None and profile.links:
            link = profile.links[0]
            found = replace(found, cores=profile.cores, link_work=(link.work, link.work_per_byte))
    else:
        if bandwidth is not None:
            raise ConfigError("--cluster says what links do; leave --bandwidth out, or --cluster")
        found, counts = _of_clusters(clusters, devices)
    between, update = profile.in_runs.between, profile.update_in_runs
    return replace(_of_kinds(found, counts, speed, memory), between=between, update=update)


def with_latency(devices: Any, latency: str | None) -> Any:
    """Return devices whose messages take some seconds besides their bytes, on each level, where they are given.

    Raises:
        ConfigError: they are no numbers, or not as many as there are levels.
    """
    if latency is None:
        return devices
    wanted, levels = "--latency takes seconds, 0 or more, as in 3e-6,2e-5", len(devices.levels)
    found = [_number(part, lambda seconds: 0 <= seconds < 1e9, wanted) for part in latency.split(",")]
    if len(found) not in (1, levels):
        raise ConfigError(
            f"--latency has {len(found)} numbers for {levels} level{'s' if levels > 1 else ''} of devices; give one, "
            "or one each"
        )
    return devices.with_latencies(found * levels if len(found) == 1 else found)


def with_host(devices: Any, bandwidth: str | None, memory: str | None) -> Any:
    """Return devices with the bandwidth to the memory of the host, and what each may have there, where they are given.

    Raises:
        ConfigError: they cannot be read, or there is a limit without a bandwidth.
    """
    found = devices if bandwidth is None else replace(devices, host=size_of("--host-bandwidth", bandwidth))
    if memory is None:
        return found
    if found.host is None:
        raise ConfigError(
            "--host-memory limits what goes to the memory of the host, but it is not known how fast that is; give "
            "--host-bandwidth, or --cluster"
        )
    return replace(found, host_memory=size_of("--host-memory", memory))


def _of_clusters(clusters: Sequence[Cluster], devices: str) -> tuple[Any, list[int]]:
    """Return devices of each of some clusters, and how many.

    Raises:
        ConfigError: there is not one number for each.
    """
    from penstock.plan.cluster.schema import devices_of_clusters

    counts = [whole_numbers("--devices, with --cluster,", part) for part in devices.split("+")]
    if any(len(numbers) > 1 for numbers in counts):
        raise ConfigError("--devices takes one number with --cluster, which knows its nodes")
    if len(counts) != len(clusters):
        raise ConfigError(
            f"--cluster names {len(clusters)} and --devices has numbers for {len(counts)}; give as many of both, as in "
            "--cluster h100,a100 --devices 8+16"
        )
    numbers = [number for (number,) in counts]
    return devices_of_clusters(clusters, numbers), numbers


def _of_kinds(devices: Any, counts: Sequence[int], speed: str | None, memory: str | None) -> Any:
    """Return devices with the speed and the memory that are given for all of them, or for each kind.

    Args:
        devices: with kinds if they are of several clusters.
        counts: of each kind.
        speed, memory: of each kind, or of all; as it is in `devices` if None.

    Raises:
        ConfigError: they cannot be read, or are not as many.
    """
    from penstock.plan.stages.device_hierarchy import DeviceKind

    kinds = devices.kinds or [DeviceKind(ascii_uppercase[at % 26], n) for at, n in enumerate(counts)]
    wanted = "--speed takes numbers above 0, as in 1,0.5"
    speeds = _for_each("--speed", speed, len(counts), lambda part: _number(part, lambda v: 0 < v < math.inf, wanted))
    speeds = speeds or [kind.speed for kind in kinds]
    memories = _for_each("--memory", memory, len(counts), lambda part: size_of("--memory", part))
    memories = memories or [kind.memory or devices.memory for kind in kinds]
    largest = None if None in memories else max(memories)
    if set(speeds) == {1.0} and len(set(memories)) == 1:
        return replace(devices, memory=largest, kinds=())
    told = (
        replace(kind, speed=speed_, memory=each) for kind, speed_, each in zip(kinds, speeds, memories, strict=True)
    )
    return replace(devices, memory=largest, kinds=tuple(told))


def _for_each(option: str, text: str | None, count: int, read: Callable[[str], _Value]) -> list[_Value]:
    """Read a value for each kind of devices, or one for all; none if the option is not given.

    Raises:
        ConfigError: they are not as many.
    """
    found = [] if text is None else [read(part) for part in text.split(",")]
    if len(found) not in (0, 1, count):
        raise ConfigError(
            f"{option} has {len(found)} values for {count} kind{'s' if count > 1 else ''} of devices; give one, or one "
            "for each number of --devices, as in --devices 2+4"
        )
    return found * count if len(found) == 1 else found


def _number(text: str, fits: Callable[[float], bool], wanted: str) -> float:
    """Read a number.

    Args:
        text: of it.
        fits: whether it is one of those that the option takes.
        wanted: what the option takes, in words.

    Raises:
        ConfigError: it is none, or does not fit.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not fits(found):
        raise ConfigError(f"{wanted}, got {text!r:.80}")
    return found


def device_counts(devices: str | None, clusters: Sequence[Cluster]) -> str:
    """Return the numbers of devices that are given, or those that the clusters have.

    Raises:
        ConfigError: neither is known.
    """
    if devices is not None:
        return devices
    unknown = next((cluster for cluster in clusters if cluster.nodes is None), None)
    if unknown is not None:
        raise ConfigError(
            f"how many devices? The cluster {unknown.name} does not say (`nodes` in its file): give --devices N, in "
            f"nodes of {unknown.node}"
        )
    return "+".join(str(cluster.node * (cluster.nodes or 1)) for cluster in clusters)


def _devices(devices: str, bandwidth: str | None, links: Sequence[Any]) -> tuple[Any, list[int]]:
    """Read the options that describe devices; links count as they were measured if no bandwidth is given.

    Returns: the devices, and how many there are of each kind.

    Raises:
        ConfigError: they cannot be read, or do not fit together.
    """
    from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices

    kinds = [_levels_of(part, devices) for part in devices.split("+")]
    units = [*kinds[0][:-1], sum(levels[-1] for levels in kinds)]
    if any(levels[:-1] != kinds[0][:-1] for levels in kinds):
        raise ConfigError(f"--devices: kinds need levels that are alike but for the last one, got {devices!r:.80}")
    latencies: list[float | None] = [None] * len(units)
    if bandwidth is None and links and set(units) != {1}:
        if len(links) not in (1, len(units)):
            raise ConfigError(
                f"the profile has {len(links)} links for {len(units)} level{'s' if len(units) > 1 else ''} of devices; "
                "give --cluster, --bandwidth, or levels of --devices for the links, as in 8x4"
            )
        bandwidth, latencies = ",".join(repr(link.bandwidth) for link in links), [link.latency for link in links]
        latencies *= len(units) if len(links) == 1 else 1
    if bandwidth is None and set(units) != {1}:
        raise ConfigError("--bandwidth is missing: bytes per second of a link between devices, as in 12GB or 10Gbit")
    speeds = [size_of("--bandwidth", part) for part in (bandwidth or "1GB").split(",")]
    speeds *= len(units) if len(speeds) == 1 else 1
    if len(speeds) != len(units):
        raise ConfigError(
            f"--bandwidth has {len(speeds)} numbers for {len(units)} levels of devices; give one, or one each"
        )
    levels = tuple(DeviceLevel(*each) for each in zip(units, speeds, latencies, strict=True))
    return Devices(levels), [math.prod(each) for each in kinds]


def _levels_of(part: str, devices: str) -> list[int]:
    """Read the numbers of devices on each level, of one kind.

    Raises:
        ConfigError: they cannot be read.
    """
    parts = [each.strip() for each in re.split("[x×]", part.lower())]
    if not all(each.isascii() and each.isdigit() and len(each) < 9 for each in parts):
        raise ConfigError(f"--devices takes a number, or numbers as in 8x4 or 2+2, got {devices!r:.80}")
    if len(parts) > 8:
        raise ConfigError(f"--devices takes 8 levels at most, got {len(parts)}")
    return [int(each) for each in parts]
