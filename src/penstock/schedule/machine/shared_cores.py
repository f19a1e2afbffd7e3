"""Cores that the ranks of a host share: while more of them work than it has cores, each is slowed down alike."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from penstock.checks import in_short, is_number
from penstock.errors import ConfigError


@dataclass(frozen=True)
class SharedCores:
    """Which ranks share the cores of a host.

    While n ranks of a host work, each works at cores / n of its speed, or at full speed if that is more.

    Attributes:
        cores: of each host: so many of its ranks can work at full speed. A rank with several threads takes as many
            cores, so with t threads each it is the number of cores over t.
        per_host: consecutive ranks on each host; all of them are on one if None.
    """

    cores: float
    per_host: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of cores."""
        if not is_number(self.cores) or not 0 < self.cores < math.inf:
            raise ConfigError(f"cores must be a number greater than 0, got {in_short(self.cores)}")
        if self.per_host is not None and (type(self.per_host) is not int or self.per_host < 1):
            raise ConfigError(f"per_host must be a number of ranks, at least 1, or None; got {in_short(self.per_host)}")

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return 0 if self.per_host is None else rank // self.per_host

    def suffice(self, ranks: int) -> bool:
        """Return whether every one of so many ranks always works at full speed."""
        return max(Counter(map(self.host_of, range(ranks))).values()) <= self.cores
