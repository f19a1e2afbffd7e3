"""The devices of a plan: how many, how they are joined, and how much each holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.checks import check_whole, in_short, is_number
from penstock.errors import ConfigError
from penstock.plan.profile.schema import MOST_DEVICES


@dataclass(frozen=True)
class DeviceLevel:
    """A level of a cluster: so many units of the level below, or devices, that send to each other.

    Attributes:
        units: how many.
        bandwidth: bytes per second between two of them.
    """

    units: int
    bandwidth: float


@dataclass(frozen=True)
class Devices:
    """Equal devices in levels, the innermost first: (4 GPUs at 12 GB/s, 2 servers at 1 GB/s) are eight devices.

    Attributes:
        levels: at least one.
        memory: bytes of each device; None for no limit.
        latency: seconds that a message takes besides its bytes, for costs that know it.
        cores: how many of them can work at full speed at once, as they share the cores of one machine, for costs that
            know it; None if each computes by itself.
        host: bytes per second from each device to the memory of its host, and as many back, for costs that know it;
            None if there is none.
        link_work: seconds of a core that a message takes at each of its ends, besides its bytes and for each of them,
            where devices share cores.
        between: seconds of a rank from one pass to the next one, for costs that know it.
        shares_link: all devices of the innermost level send to others by one link; the bandwidth of the next level is
            the part of each.
    """

    levels: tuple[DeviceLevel, ...]
    memory: float | None = None
    latency: float = 0.0
    cores: float | None = None
    host: float | None = None
    link_work: tuple[float, float] = (0.0, 0.0)
    between: float = 0.0
    shares_link: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: there is no level, or a number out of its range.
        """
        if not self.levels:
            raise ConfigError("devices: there must be at least one level")
        for level in self.levels:
            check_whole("devices", level.units, 1, MOST_DEVICES)
            _check_positive("bandwidth", level.bandwidth)
        check_whole("devices, altogether", self.count, 1, MOST_DEVICES)
        if self.memory is not None:
            _check_positive("memory", self.memory)
        if self.cores is not None:
            _check_positive("cores", self.cores)
        if self.host is not None:
            _check_positive("bandwidth to the host", self.host)
        if not is_number(self.latency) or not 0 <= self.latency < 1e30:
            raise ConfigError(f"latency must be a number of seconds, not negative, got {in_short(self.latency)}")

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(level.units for level in self.levels)

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the slowest level, for costs that know one only."""
        return min(level.bandwidth for level in self.levels)

    def message_work(self, nbytes: float, ranks: int) -> float:
        """Return by how long a message keeps the rank at each of its ends from its passes.

        Threads of the rank send and receive it. They have cores of their own if there are two for each rank.
        """
        if self.cores is None or self.cores >= 2 * ranks:
            return 0.0
        return self.link_work[0] + nbytes * self.link_work[1]

    def __str__(self) -> str:
        """Return how many there are, level by level."""
        return " x ".join(str(level.units) for level in self.levels)


def _check_positive(what: str, value: object) -> None:
    """Refuse what is not a positive, finite number.

    Raises:
        ConfigError: it is not.
    """
    if not is_number(value) or not 0 < value < 1e30:
        raise ConfigError(f"{what} must be a number above 0 and below 1e30, got {in_short(value)}")
