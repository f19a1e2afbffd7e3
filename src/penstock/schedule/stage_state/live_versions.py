"""The versions of the weights of one stage that exist while a schedule is played, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from penstock.schedule.ir.schedule import Op
from penstock.schedule.stage_state.microbatch_state import BooksError, Flights, VersionNumber
from penstock.schedule.stage_state.shard_state import ShardState
from penstock.schedule.stage_state.stage_constants import StageSpec


def version_numbers(numbers: Iterable[int]) -> tuple[VersionNumber, ...]:
    """Return numbers of versions as errors show them."""
    return tuple(map(VersionNumber, numbers))


@dataclass
class LiveVersions:
    """The versions of a stage, counted from the start of the span.

    Attributes:
        newest: the last one that an update made.
        alive: those that exist.
        provisional: those of them that VALIDATE has not accepted.
        forwards: the position of the next forward; see `Forwards`.
        draining: the number of batches of the span, once its last period is over.
        newest_read: True if a pass has read the newest version.
    """

    spec: StageSpec
    newest: int = 0
    alive: set[int] = field(default_factory=set)
    provisional: set[int] = field(default_factory=set)
    forwards: int = 0
    newest_read: bool = False
    draining: int | None = None

    def __post_init__(self) -> None:
        if not self.alive:
            self.alive = set(range(self.spec.older, 1))
            self.forwards = self.spec.forwards.settled(0)

    def __len__(self) -> int:
        return len(self.alive)

    def copy(self) -> LiveVersions:
        """Return an independent copy."""
        return replace(self, alive=set(self.alive), provisional=set(self.provisional))

    def shifted(self, batches: int) -> LiveVersions:
        """Return a copy in which everything is `batches` batches later."""
        return replace(
            self,
            newest=self.newest + batches,
            alive={v + batches for v in self.alive},
            provisional={v + batches for v in self.provisional},
            forwards=self.forwards + batches * len(self.spec.forwards.period),
        )

    def state(self, t: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        place = self.forwards - t * len(self.spec.forwards.period)
        versions = sorted(v - t for v in self.alive), sorted(v - t for v in self.provisional), self.newest - t
        return versions, place, self.newest_read

    def drain(self, batches: int) -> None:
        """Begin the epilogue of a span of `batches` batches."""
        self.draining = batches
        self.forwards = self.spec.forwards.settled(0, batches)

    def forward(self) -> None:
        """Take note that the next forward has run."""
        self.forwards = self.spec.forwards.settled(self.forwards + 1, self.draining)

    def read(self, op: Op, versions: tuple[int, ...], shards: ShardState, named: tuple[int, ...] | None = None) -> None:
        """Read versions, which must exist.

        Args:
            op: that reads them.
            versions: their numbers.
            shards: where what is gathered is known.
            named: the numbers before those older than the span are taken for one: what is gathered is known by these.

        Raises:
            BooksError: one does not exist, or is not valid yet.
        """
        for version in versions:
            if version not in self.alive:
                why = "does not exist yet" if version > self.newest else "no longer exists"
                raise BooksError("reads version {}, which {}", VersionNumber(version), why)
            if version in self.provisional and op is not Op.F:
                raise BooksError("reads version {} before VALIDATE accepts it", VersionNumber(version))
        if op is not Op.GATHER:
            for version in named or versions:
                shards.read(version)
        if self.newest in versions:
            self.newest_read = True

    def make(self, batch: int, in_place: bool) -> None:
        """Make version batch + 1, over the one before it or beside it."""
        if in_place:
            self.alive.discard(batch)
        self.newest = batch + 1
        self.newest_read = False
        self.alive.add(self.newest)
        if self.spec.rule.provisional:
            self.provisional.add(self.newest)

    def accept(self, version: int) -> None:
        """Accept a provisional version, or reject it: it is made again under the same number.

        Raises:
            BooksError: it is not provisional.
        """
        if version not in self.provisional:
            raise BooksError("version {} is not provisional", VersionNumber(version))
        self.provisional.discard(version)

    def oldest_read(self) -> int:
        """Return the oldest version that future forwards read; later spans read the last `delay` + 1."""
        oldest = self.spec.forwards.oldest(self.forwards, self.draining)
        if oldest is not None:
            oldest = max(oldest, self.spec.older)
            if self.draining is None:
                return oldest
        last = self.newest + 1 if self.draining is None else self.draining
        return min(last - self.spec.rule.delay, last if oldest is None else oldest)

    def drop_dead(self, flights: Flights) -> None:
        """Drop versions that no future forward, no backward in flight and no update will read."""
        floor = min(self.newest, self.oldest_read(), *(v - 1 for v in self.provisional))
        if min(self.alive) < floor:
            held = flights.versions() if self.spec.rule.pins else set()
            self.alive = {v for v in self.alive if v >= floor or v in held}
