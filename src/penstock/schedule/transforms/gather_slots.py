"""Which stages of a rank are whole at which time, where there are fewer places than stages.

With the offline-optimal choice (Belady, IBM Systems Journal 1966) the stage that is used again last gives up its place,
which takes the fewest loads; direct-mapped, stage i of a rank has place i mod k, as in Fast-LLM, for which counts are
published.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from penstock.errors import ConfigError
from penstock.schedule.ir.sharding import Cache


class Placed(Protocol):
    """What takes a place: a stage, or a version of one; they have an order."""

    @property
    def rank(self) -> int:
        """The rank that has it."""
        ...

    @property
    def name(self) -> str:
        """Its name, for people."""
        ...

    def __hash__(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


S = TypeVar("S", bound=Placed)


@dataclass
class Stay(Generic[S]):
    """The time during which a stage has a place.

    Attributes:
        stage: the stage, or a version of one.
        since: the position after which its place is free; -1 at the start.
        first, last: positions of its first and last use during the stay.
    """

    stage: S
    since: int
    first: int
    last: int


def stays(
    uses: Sequence[Collection[S]],
    slots: int,
    cache: Cache = Cache.OPTIMAL,
    leave: Mapping[S, int] | None = None,
) -> list[Stay[S]]:
    """Give stages places so that each has one whenever it is used.

    Args:
        uses: the stages that are used together at each position.
        slots: k, the number of places.
        cache: who gives up a place.
        leave: the positions after which stages give up their places by themselves.

    Returns:
        The stays, by first use.

    Raises:
        ConfigError: stages that are used together need more places.
    """
    found: list[Stay[S]] = []
    held: dict[S, Stay[S]] = {}
    freed: list[int] = [-1] * slots  # of places that nobody has: since when
    index = {stage: i for i, stage in enumerate(sorted({stage for here in uses for stage in here}))}
    for position, here in enumerate(uses):
        for stage in sorted(here):
            if stage in held:
                held[stage].last = position
                continue
            rival = _rival(stage, here, held, uses[position + 1 :], slots, cache, index)
            since = freed.pop(0) if rival is None else held.pop(rival).last
            held[stage] = Stay(stage, since, position, position)
            found.append(held[stage])
        for stage in [stage for stage in held if leave and leave.get(stage) == position]:
            del held[stage]
            freed.append(position)
    return found


def _rival(
    stage: S,
    together: Collection[S],
    held: Mapping[S, Stay[S]],
    later: Sequence[Collection[S]],
    slots: int,
    cache: Cache,
    index: Mapping[S, int],
) -> S | None:
    """Return the stage that gives up its place; None where one is free."""
    if cache is Cache.DIRECT:
        rivals = [other for other in held if index[other] % slots == index[stage] % slots]
    else:
        rivals = list(held) if len(held) == slots else []
    if not rivals:
        return None
    movable = [other for other in rivals if other not in together]
    if not movable:
        raise ConfigError(
            f"rank {stage.rank} uses stages {', '.join(s.name for s in sorted(together))} at once, for which "
            f"{slots} place{'s do' if slots > 1 else ' does'} not do"
            + (" with a direct-mapped cache" if cache is Cache.DIRECT else "")
            + "; allow more of them"
        )

    def next_use(other: S) -> tuple[int, int]:
        again = next((i for i, here in enumerate(later) if other in here), len(later))
        return again, -held[other].last  # of those never used again, the one whose place is free first

    return max(movable, key=next_use)
