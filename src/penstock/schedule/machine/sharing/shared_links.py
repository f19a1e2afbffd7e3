"""Links that the ranks of a host share: what is under way at the same time divides their rate."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checks import in_short
from penstock.errors import ConfigError


@dataclass(frozen=True)
class SharedLinks:
    """Which ranks share the link of a host.

    A message occupies what leaves its sender's host and what comes to its receiver's. A gather or sum occupies both
    directions of the hosts of all its ranks. While n of them occupy a direction, each has at most 1 / n of its rate.

    Attributes:
        per_host: consecutive ranks on each host; all of them are on one if None. Their messages to each other do not
            occupy the link.
    """

    per_host: int | None = 1

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        if self.per_host is not None and (type(self.per_host) is not int or self.per_host < 1):
            raise ConfigError(f"per_host must be a number of ranks, at least 1, or None; got {in_short(self.per_host)}")

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return 0 if self.per_host is None else rank // self.per_host
