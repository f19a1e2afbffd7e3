"""Determine which versions future forwards of a stage will read, and so which ones must be kept alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.ir.schedule import Action, Op, Schedule, Stage, split_fused


@dataclass(frozen=True)
class Forwards:
    """The versions that the forwards of a stage read, in the order of its rank's program.

    A position counts forwards from the start of the span, through all periods; in an epilogue, from its start.

    Attributes:
        microbatches: m.
        period, epilogue: (first microbatch, oldest version read) of each forward, relative as in the program.
    """

    microbatches: int
    period: tuple[tuple[int, int], ...]
    epilogue: tuple[tuple[int, int], ...]

    @cached_property
    def _oldest_from(self) -> list[int]:
        """For each position in a period, return the oldest version read from there to the end of the next period."""
        following = 1 + min(version for _, version in self.period)
        result = []
        for _, version in reversed(self.period):
            following = min(following, version)
            result.append(following)
        return result[::-1]

    def settled(self, position: int, batches: int | None = None) -> int:
        """Return `position`, moved past forwards that do not exist because they lie before the span.

        Args:
            position: a position in the periods, or in the epilogue.
            batches: the length of the span once its epilogue has begun.
        """
        if batches is not None:
            while position < len(self.epilogue) and self.epilogue[position][0] + batches * self.microbatches < 0:
                position += 1
        elif self.period:
            t, place = divmod(position, len(self.period))
            while self.period[place][0] + t * self.microbatches < 0:
                position += 1
                t, place = divmod(position, len(self.period))
        return position

    def oldest(self, position: int, batches: int | None = None) -> int | None:
        """Return the oldest version that the forwards from `position` on read, or None if there are none."""
        if batches is not None:
            left = self.epilogue[position:]
            return batches + min(version for _, version in left) if left else None
        if not self.period:
            return None
        t, place = divmod(position, len(self.period))
        return t + self._oldest_from[place]


def forwards_of(schedule: Schedule, ranks: Iterable[int]) -> dict[Stage, Forwards]:
    """Return the forwards of every stage of some ranks that names versions."""
    found: dict[Stage, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {n: ([], []) for n in schedule.stages}
    for rank in ranks:
        for part, actions in enumerate(schedule.program(rank)):
            for p in _forwards(actions):
                assert p.reads is not None
                found[p.stage][part].append((p.unit.first, min(p.reads.versions)))
    m = schedule.microbatches
    return {stage: Forwards(m, tuple(period), tuple(epilogue)) for stage, (period, epilogue) in found.items()}


def _forwards(actions: Iterable[Action]) -> Iterator[Action]:
    return (p for p in split_fused(actions) if p.op is Op.F and p.reads is not None)
