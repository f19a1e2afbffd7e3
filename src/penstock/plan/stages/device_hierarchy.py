"""The devices of a plan: how many, how they are joined, and how much each holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, get_args

from penstock.byte_sizes import human_bytes
from penstock.checks import check_whole, in_short, in_words, is_number
from penstock.errors import ConfigError
from penstock.plan.profile.schema import MOST_DEVICES

Collectives = Literal["ring", "hierarchical"]
MOST_KINDS = 8
"""Of devices that differ."""


@dataclass(frozen=True)
class DeviceLevel:
    """A level of a cluster: so many units of the level below, or devices, that send to each other.

    Attributes:
        units: how many.
        bandwidth: bytes per second between two of them.
        latency: seconds that a message between two of them takes besides its bytes, for costs that know it; None for
            that of `Devices`.
    """

    units: int
    bandwidth: float
    latency: float | None = None


@dataclass(frozen=True)
class DeviceKind:
    """Devices that are alike, beside others that are not.

    Attributes:
        name: for people.
        count: how many.
        speed: how many times as fast as the profile their passes and updates are.
        memory: bytes of each; None for those of `Devices`.
    """

    name: str
    count: int
    speed: float = 1.0
    memory: float | None = None

    def __str__(self) -> str:
        memory = "" if self.memory is None else f" and {human_bytes(self.memory, 2)}"
        return f"{self.name}: {self.count} with {self.speed:.4g} times the speed of the profile{memory}"

    def __post_init__(self) -> None:
        check_whole(f"devices of kind {self.name}", self.count, 1, MOST_DEVICES)
        _check_positive(f"speed of devices {self.name}", self.speed)
        if self.memory is not None:
            _check_positive(f"memory of devices {self.name}", self.memory)


@dataclass(frozen=True)
class StageDevices:
    """The devices of the replicas of a stage, where devices differ.

    Attributes:
        kinds: names of their kinds, one for each replica.
        speed: of the slowest of them.
        memory: bytes of the smallest; None for no limit.
    """

    kinds: tuple[str, ...]
    speed: float
    memory: float | None

    def __str__(self) -> str:
        names = Counter(self.kinds)
        return self.kinds[0] if len(names) == 1 else " + ".join(f"{n} {name}" for name, n in names.items())


@dataclass(frozen=True)
class Devices:
    """Devices in levels, the innermost first: (4 GPUs at 12 GB/s, 2 servers at 1 GB/s) are eight devices.

    Attributes:
        levels: at least one.
        memory: bytes of each device, of the largest one if they differ; None for no limit.
        latency: seconds that a message takes besides its bytes, for costs that know it, on levels without one of their
            own.
        cores: how many of them can work at full speed at once, as they share the cores of one machine, for costs that
            know it; None if each computes by itself.
        host: bytes per second from each device to the memory of its host, and as many back, for costs that know it;
            None if there is none.
        host_memory: bytes that each device may have in the memory of its host; None for no limit.
        link_work: seconds of a core that a message takes at each of its ends, besides its bytes and for each of them,
            where devices share cores.
        between: seconds of a rank from one pass to the next one, for costs that know it.
        update: seconds of the update of a stage besides those of its layers, for costs that know it.
        shares_link: all devices of the innermost level send to others by one link; the bandwidth of the next level is
            the part of each.
        collectives: how sums and gathers over several servers go, for costs that know it: "ring" around all devices, or
            "hierarchical", within servers and between them.
        kinds: of devices that differ, for costs that know it; none if all are as the profile says and hold `memory`.
    """

    levels: tuple[DeviceLevel, ...]
    memory: float | None = None
    latency: float = 0.0
    cores: float | None = None
    host: float | None = None
    host_memory: float | None = None
    link_work: tuple[float, float] = (0.0, 0.0)
    between: float = 0.0
    update: float = 0.0
    shares_link: bool = False
    collectives: Collectives = "ring"
    kinds: tuple[DeviceKind, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError("devices: there must be at least one level")
        for level in self.levels:
            check_whole("devices", level.units, 1, MOST_DEVICES)
            _check_positive("bandwidth", level.bandwidth)
        check_whole("devices, altogether", self.count, 1, MOST_DEVICES)
        if self.collectives not in get_args(Collectives):
            known = in_words(get_args(Collectives))
            raise ConfigError(f"collectives must be {known}, got {in_short(self.collectives)}")
        if self.memory is not None:
            _check_positive("memory", self.memory)
        if self.cores is not None:
            _check_positive("cores", self.cores)
        if self.host is not None:
            _check_positive("bandwidth to the host", self.host)
        if self.host_memory is not None:
            _check_positive("memory of the host", self.host_memory)
        for latency in (self.latency, *self.latencies):
            if not is_number(latency) or not 0 <= latency < 1e30:
                raise ConfigError(f"latency must be a number of seconds, not negative, got {in_short(latency)}")
        if self.kinds:
            _check_kinds(self)

    @property
    def count(self) -> int:
        return math.prod(level.units for level in self.levels)

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the slowest level, for costs that know one only."""
        return min(level.bandwidth for level in self.levels)

    @property
    def latencies(self) -> tuple[float, ...]:
        """Seconds that a message takes besides its bytes, level by level."""
        return tuple(self.latency if level.latency is None else level.latency for level in self.levels)

    def with_latencies(self, latencies: Sequence[float]) -> Devices:
        """Return the same devices with other latencies of levels."""
        levels = [replace(level, latency=each) for level, each in zip(self.levels, latencies, strict=True)]
        return replace(self, levels=tuple(levels), latency=0.0)

    def message_work(self, nbytes: float, ranks: int) -> float:
        """Return by how long a message keeps the rank at each of its ends from its passes.

        Threads of the rank send and receive it. They have cores of their own if there are two for each rank.
        """
        if self.cores is None or self.cores >= 2 * ranks:
            return 0.0
        return self.link_work[0] + nbytes * self.link_work[1]

    def __str__(self) -> str:
        if self.kinds:
            return " + ".join(f"{kind.count} {kind.name}" for kind in self.kinds)
        return " x ".join(str(level.units) for level in self.levels)


def places_in_words(placement: Sequence[str], depth: int) -> str:
    """Say on which kind of devices each rank belongs, and what to do for that.

    Args:
        placement: names of kinds, one for each rank.
        depth: ranks of a pipeline.
    """
    first = list(placement[:depth])
    alike = len(placement) > depth > 1 and first * (len(placement) // depth) == list(placement)
    words, at = list[str](), 0
    for name, row in groupby(first if alike else placement):
        count = len(list(row))
        words.append(f"rank {at} on {name}" if count == 1 else f"ranks {at} to {at + count - 1} on {name}")
        at += count
    each = f"of every {depth} ranks: " * alike
    return f"Ranks belong on devices that differ: {each}{', '.join(words)}; start processes on hosts in this order"


def _check_kinds(devices: Devices) -> None:
    kinds, names = devices.kinds, [kind.name for kind in devices.kinds]
    if len(kinds) > MOST_KINDS or len(set(names)) < len(names):
        raise ConfigError(f"devices differ in at most {MOST_KINDS} kinds with a name each, got {in_short(names)}")
    count = sum(kind.count for kind in kinds)
    if count != devices.count:
        raise ConfigError(f"kinds of devices: {count} devices are of some kind, but there are {devices.count}")
    for kind in kinds:
        if kind.memory is not None and (devices.memory is None or kind.memory > devices.memory):
            raise ConfigError(
                f"memory of devices {kind.name} is {kind.memory:g} bytes, but that of the largest device "
                f"{'not given' if devices.memory is None else format(devices.memory, 'g')}"
            )


def _check_positive(what: str, value: object) -> None:
    if not is_number(value) or not 0 < value < 1e30:
        raise ConfigError(f"{what} must be a number above 0 and below 1e30, got {in_short(value)}")
