"""Work on what is shared, in the order of time: while more of it goes on than there is room for, all takes longer."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[int, int]
"""Of work: its kind, and a number. Of what begins or ends at the same time, the least is first."""

Shared = tuple[str, int]
"""What is shared: its kind, and the host."""


class Ended(NamedTuple):
    """Work that has ended."""

    key: Key
    start: float
    end: float


@dataclass
class _SharedWork:
    """What is going on.

    Attributes:
        start: when it began.
        since: when `left` was left.
        left: at full speed.
        uses: of what is shared.
        speed: at which it goes on; 0 before it has begun.
    """

    start: float
    since: float
    left: float
    uses: tuple[Shared, ...]
    speed: float = 0.0


class SharedTime:
    """All work, in the order of time.

    What n works use, and what has room for fewer of them at full speed, lets each go at room / n of it. A work that
    uses several goes at the least of these speeds.

    Args:
        room: of each that is shared.
    """

    def __init__(self, room: Mapping[Shared, float]) -> None:
        self._room = room
        self._work: dict[Key, _SharedWork] = {}
        self._users: dict[Shared, set[Key]] = defaultdict(set)
        self._coming: list[tuple[float, Key, float, tuple[Shared, ...]]] = []

    def begin(self, key: Key, start: float, work: float, uses: tuple[Shared, ...]) -> None:
        """Let work begin, no earlier than the last work has ended.

        Args:
            key: no other work has it while this one goes on.
            start: when it begins.
            work: its time at full speed.
            uses: something that is shared, or several.
        """
        heapq.heappush(self._coming, (start, key, work, uses))

    def next(self) -> Ended | None:
        """Return what ends next; None if nothing is left."""
        while True:
            end, first = min(((w.since + w.left / w.speed, key) for key, w in self._work.items()), default=_NEVER)
            if self._coming and self._coming[0][0] < end:  # what ends first makes room for what begins at that time
                start, key, left, uses = heapq.heappop(self._coming)
                if not left:
                    return Ended(key, start, start)
                self._work[key] = _SharedWork(start, start, left, uses)
                for each in uses:
                    self._users[each].add(key)
                self._divide(uses, start)
            elif math.isinf(end):
                return None
            else:
                done = self._work.pop(first)
                for each in done.uses:
                    self._users[each].discard(first)
                self._divide(done.uses, end)
                return Ended(first, done.start, end)

    def _divide(self, shared: tuple[Shared, ...], now: float) -> None:
        """Divide what has been taken or left among those that use it from now on."""
        for key in {key for each in shared for key in self._users[each]}:
            work = self._work[key]
            speed = min([1.0, *(self._room[each] / len(self._users[each]) for each in work.uses)])
            if speed != work.speed:  # so that nothing is rounded while there is room for all
                work.left = max(work.left - (now - work.since) * work.speed, 0.0)
                work.since, work.speed = now, speed


_NEVER = (math.inf, (0, 0))
