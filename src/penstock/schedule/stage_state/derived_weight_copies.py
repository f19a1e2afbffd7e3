"""Track the derived weight copies of one stage: made by a PREDICT, dropped after their last read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.schedule.ir.schedule import Copy
from penstock.schedule.stage_state.microbatch_state import BooksError, MicrobatchNumber


@dataclass
class Copies:
    """The derived weight copies of a stage.

    Attributes:
        uses: reads of each copy per period, by label and microbatch modulo m.
        alive: remaining reads of each copy, and the versions it was made of.
        peak: the most copies alive at once.
    """

    uses: Mapping[Copy, int]
    microbatches: int
    alive: dict[Copy, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    peak: int = 0

    def __iter__(self) -> Iterator[Copy]:
        return iter(self.alive)

    def create(self, copy: Copy, versions: tuple[int, ...]) -> None:
        """Record that a PREDICT makes a copy of these versions."""
        uses = self.uses.get(Copy(copy.label, copy.first % self.microbatches), 0)
        if not uses or copy in self.alive:
            raise BooksError("makes a copy that no pass reads or that already exists")
        self.alive[copy] = uses, versions
        self.peak = max(self.peak, len(self.alive))

    def read(self, copy: Copy, versions: tuple[int, ...]) -> None:
        """Record that a pass reads a copy, and check that it was made of these versions."""
        if copy not in self.alive:
            raise BooksError(
                "reads copy {}{}, which no PREDICT has made or which was already dropped",
                copy.label,
                MicrobatchNumber(copy.first),
            )
        left, made = self.alive[copy]
        if made != versions:
            raise BooksError("copy {}{} was made of other versions", copy.label, MicrobatchNumber(copy.first))
        if left > 1:
            self.alive[copy] = left - 1, made
        else:
            del self.alive[copy]

    def state(self, t: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        k = t * self.microbatches
        return sorted((c.label, c.first - k, n, [v - t for v in made]) for c, (n, made) in self.alive.items())

    def shifted(self, batches: int, microbatches: int) -> Copies:
        """Return a copy in which everything is that many batches, and microbatches, later."""
        alive = {
            copy._replace(first=copy.first + microbatches): (left, tuple(v + batches for v in made))
            for copy, (left, made) in self.alive.items()
        }
        return Copies(self.uses, self.microbatches, alive, self.peak)

    def copy(self) -> Copies:
        """Return an independent copy."""
        return Copies(self.uses, self.microbatches, dict(self.alive), self.peak)
