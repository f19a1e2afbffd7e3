"""The profile, devices and links that `penstock plan` is asked to plan for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cli.plans.sizes import size_of, whole_numbers
from penstock.errors import ConfigError


def cluster_named(name: str) -> Any:
    """Return a preset, a cluster from a file, or the machine at hand, which is measured.

    Raises:
        ConfigError: there is no such preset, or the file is no cluster.
    """
    from penstock.plan.cluster.files import THIS_MACHINE, find_cluster

    if name != THIS_MACHINE:
        return find_cluster(name)
    from penstock.measure.machine.this_machine import this_machine

    return this_machine()


def link_matrix_of(path: Path, planner: str) -> Any:
    """Read the bandwidths between all pairs of devices.

    Raises:
        ConfigError: it cannot be read, is none, or no planner takes it.
    """
    from penstock.plan.any_links.device_order import checked_links
    from penstock.yaml_file import read_yaml

    if planner != "spp":
        raise ConfigError("--link-matrix is for --planner spp; others know levels of devices (--devices, --bandwidth)")
    return checked_links(read_yaml(path).get("links"))


def devices_of(
    cluster: str | None,
    devices: str,
    bandwidth: str | None,
    memory: str | None,
    profile: Any,
    with_links: bool = False,
    host_bandwidth: str | None = None,
) -> Any:
    """Return the devices of a cluster, or those that options describe: ranks of the profiled machine, if no links do.

    Raises:
        ConfigError: they cannot be read, or do not fit together.
    """
    if cluster is None:
        if with_links and bandwidth is None:
            bandwidth = "1GB"  # not used
        found = _devices(devices, bandwidth, memory, profile.links)
        if bandwidth is None and profile.links:
            link = profile.links[0]
            found = replace(found, cores=profile.cores, link_work=(link.work, link.work_per_byte))
        return _completed(found, profile, host_bandwidth)

    if bandwidth is not None:
        raise ConfigError("--cluster says what links do; leave --bandwidth out, or --cluster")
    (count, *more) = whole_numbers("--devices, with --cluster,", devices)
    if more:
        raise ConfigError("--devices takes one number with --cluster, which knows its nodes")
    found = cluster_named(cluster).devices(count)
    found = found if memory is None else replace(found, memory=size_of("--memory", memory))
    return _completed(found, profile, host_bandwidth)


def _completed(devices: Any, profile: Any, host_bandwidth: str | None) -> Any:
    """Return devices with what a profile says of their ranks, and the bandwidth to their hosts, if it is given.

    Raises:
        ConfigError: it cannot be read.
    """
    found = replace(devices, between=profile.in_runs.between)
    return found if host_bandwidth is None else replace(found, host=size_of("--host-bandwidth", host_bandwidth))


def known_profile(profile: Path | None, devices: str | None, bandwidth: str | None) -> Any:
    """Read the profile to plan for, where the other options that a plan needs are there, too.

    Raises:
        ConfigError: options are missing; the message names all of them.
    """
    from penstock.plan.profile.files import read_profile

    known = None if profile is None else read_profile(profile)
    given = {
        "--profile FILE": known is not None,
        "--devices N": devices is not None,
        "--bandwidth B": bandwidth is not None or (known is not None and bool(known.links)),
    }
    if known is None or devices is None:
        lacking = [option for option, is_there in given.items() if not is_there]
        raise ConfigError(
            f"plan needs {' and '.join(lacking)} (no bandwidth where the profile has measured links, or for one "
            "device). First penstock profile --out mine.yaml, then penstock plan --profile mine.yaml --devices 4"
        )
    return known


def _devices(devices: str, bandwidth: str | None, memory: str | None, links: Sequence[Any]) -> Any:
    """Read the options that describe devices; links count as they were measured if no bandwidth is given.

    Raises:
        ConfigError: they cannot be read, or do not fit together.
    """
    from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices

    parts = re.split("[x×]", devices.strip().lower())
    if not all(part.strip().isascii() and part.strip().isdigit() and len(part) < 9 for part in parts):
        raise ConfigError(f"--devices takes a number, or numbers as in 8x4, got {devices!r:.80}")
    if len(parts) > 8:
        raise ConfigError(f"--devices takes 8 levels at most, got {len(parts)}")
    latency = 0.0
    if bandwidth is None and links and {int(part) for part in parts} != {1}:
        if len(links) not in (1, len(parts)):
            raise ConfigError(
                f"the profile has {len(links)} links for {len(parts)} level{'s' if len(parts) > 1 else ''} of devices; "
                "give --cluster, --bandwidth, or levels of --devices for the links, as in 8x4"
            )
        bandwidth, latency = ",".join(repr(link.bandwidth) for link in links), max(link.latency for link in links)
    if bandwidth is None and {int(part) for part in parts} != {1}:
        raise ConfigError("--bandwidth is missing: bytes per second of a link between devices, as in 12GB or 10Gbit")
    speeds = [size_of("--bandwidth", part) for part in (bandwidth or "1GB").split(",")]
    speeds *= len(parts) if len(speeds) == 1 else 1
    if len(speeds) != len(parts):
        raise ConfigError(
            f"--bandwidth has {len(speeds)} numbers for {len(parts)} levels of devices; give one, or one each"
        )
    levels = tuple(DeviceLevel(int(part), speed) for part, speed in zip(parts, speeds, strict=True))
    return Devices(levels, None if memory is None else size_of("--memory", memory), latency)
