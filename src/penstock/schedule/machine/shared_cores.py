"""Cores that the ranks of a host share: while more of them work than it has cores, each is slowed down alike."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

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


class Ended(NamedTuple):
    """Work that has ended."""

    rank: int
    start: float
    end: float


@dataclass
class _CoreWork:
    """What a rank is working on.

    Attributes:
        start: when it began.
        since: when `left` was left.
        left: at full speed.
    """

    start: float
    since: float
    left: float


class _Host:
    """A host whose ranks are at work."""

    def __init__(self, cores: float) -> None:
        self.work: dict[int, _CoreWork] = {}
        self._cores, self._speed = cores, 1.0

    def earliest(self) -> tuple[float, int]:
        """Return when the first of its ranks is done if no other one begins, and which."""
        return min(((work.since + work.left / self._speed, rank) for rank, work in self.work.items()), default=_NEVER)

    def begin(self, rank: int, start: float, work: float) -> None:
        """Let a rank begin to work."""
        self.work[rank] = _CoreWork(start, start, work)
        self._share(start)

    def end(self, rank: int, now: float) -> _CoreWork:
        """Return the work of a rank that is done."""
        work = self.work.pop(rank)
        self._share(now)
        return work

    def _share(self, now: float) -> None:
        """Divide the cores among the ranks that work from now on."""
        speed = min(1.0, self._cores / max(len(self.work), 1))
        if speed == self._speed:  # so that nothing is rounded while there are enough cores
            return
        for work in self.work.values():
            work.left = max(work.left - (now - work.since) * self._speed, 0.0)
            work.since = now
        self._speed = speed


_NEVER = (math.inf, -1)


class CoreTime:
    """The work of all ranks, in the order of time.

    Args:
        shared: which ranks share cores.
        ranks: how many there are.
    """

    def __init__(self, shared: SharedCores, ranks: int) -> None:
        self._hosts = [_Host(shared.cores) for _ in range(shared.host_of(ranks - 1) + 1)]
        self._host_of = [self._hosts[shared.host_of(rank)] for rank in range(ranks)]
        self._coming: list[tuple[float, int, float]] = []

    def begin(self, rank: int, start: float, work: float) -> None:
        """Let a rank begin to work, no earlier than the last work has ended."""
        heapq.heappush(self._coming, (start, rank, work))

    def next(self) -> Ended | None:
        """Return what ends next; None if nothing is left."""
        while True:
            end, rank = min(host.earliest() for host in self._hosts)
            if self._coming and self._coming[0][0] < end:  # what ends first makes room for what begins at that time
                start, rank, work = heapq.heappop(self._coming)
                if not work:
                    return Ended(rank, start, start)
                self._host_of[rank].begin(rank, start, work)
            elif math.isinf(end):
                return None
            else:
                return Ended(rank, self._host_of[rank].end(rank, end).start, end)
