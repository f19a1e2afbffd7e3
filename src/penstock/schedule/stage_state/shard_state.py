"""What of one stage's weights and gradients is whole on a rank, while a sharded schedule is played.

Every rank owns a shard of each version and, from a REDUCE on, of each sum. With level full a version is whole from a
GATHER to its RELEASE, and several may be at once. With levels optimizer and gradients all versions are whole but the
newest between its STEP, which writes the shard, and the GATHER that completes it in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.schedule.ir.sharding import Level
from penstock.schedule.stage_state.microbatch_state import BooksError, VersionNumber


@dataclass
class ShardState:
    """The gathered versions and unreduced gradients of a stage.

    Attributes:
        level: what is split.
        gathered: with level full, the versions that are whole.
        incomplete: with levels optimizer and gradients, the versions of which only the own shard has been written.
        unreduced: with levels gradients and full, the batches to whose full-size gradient backwards have added since
            its last REDUCE.
    """

    level: Level
    gathered: set[int] = field(default_factory=set)
    incomplete: set[int] = field(default_factory=set)
    unreduced: set[int] = field(default_factory=set)

    def gather(self, version: int) -> None:
        """Make a version whole."""
        if self.level is Level.NONE:
            raise BooksError(
                "gathers weights that are not sharded; a schedule with GATHERs says so in a line, such as 'sharding "
                "full'"
            )
        if self.level is not Level.FULL:
            if version not in self.incomplete:
                raise BooksError(
                    "gathers version {}, which is whole already: with sharding {} a GATHER completes what a STEP wrote",
                    VersionNumber(version),
                    self.level,
                )
            self.incomplete.discard(version)
            return
        if version in self.gathered:
            raise BooksError("gathers version {}, which is gathered already", VersionNumber(version))
        self.gathered.add(version)

    def release(self, version: int) -> None:
        """Free a gathered version."""
        if self.level is not Level.FULL:
            raise BooksError(
                "releases weights that stay whole with sharding {}; only level full has RELEASEs", self.level
            )
        if version not in self.gathered:
            raise BooksError("releases version {}, which is not gathered", VersionNumber(version))
        self.gathered.discard(version)

    def read(self, version: int) -> None:
        """Check that a pass may read a version."""
        if self.level is Level.FULL and version not in self.gathered:
            raise BooksError(
                "reads version {}, which is not gathered here: a GATHER of it must come before, and its RELEASE after",
                VersionNumber(version),
            )
        if version in self.incomplete:
            raise BooksError(
                "reads version {}, of which only the own shard is written; a GATHER must complete it before",
                VersionNumber(version),
            )

    def add(self, batch: int) -> None:
        """Record that a backward adds to the full-size gradient of a batch."""
        if self.level.splits_gradients:
            self.unreduced.add(batch)

    def reduce(self, batch: int) -> None:
        """Add the full-size gradient of a batch over all pipelines, and keep a shard of the sum."""
        if batch not in self.unreduced:
            raise BooksError(
                "adds nothing: no backward of batch {} has run on this stage since its last REDUCE, so the sum would "
                "count twice",
                VersionNumber(batch),
            )
        self.unreduced.discard(batch)

    def step(self, batch: int, in_place: bool) -> None:
        """Write the shard of the version that the update of a batch makes, over the version before it if in place."""
        if in_place and batch in self.gathered:
            raise BooksError(
                "updates version {}, which is still gathered; a RELEASE must come before, as the gathered copy "
                "would be the old weights",
                VersionNumber(batch),
            )
        if self.level in (Level.OPTIMIZER, Level.GRADIENTS):
            if in_place:
                self.incomplete.discard(batch)
            self.incomplete.add(batch + 1)

    def left(self) -> dict[str, list[int]]:
        """Return what must not be there when the pipeline is drained."""
        return {
            "gathered weights of version": sorted(self.gathered),
            "only its own shard of version": sorted(self.incomplete),
        }

    def state(self, t: int) -> object:
        """Return a comparable state, with numbers relative to batch t."""
        return [sorted(number - t for number in each) for each in (self.gathered, self.incomplete, self.unreduced)]

    def shifted(self, batches: int) -> ShardState:
        """Return a copy in which everything is that many batches later."""
        sets = ({number + batches for number in each} for each in (self.gathered, self.incomplete, self.unreduced))
        return ShardState(self.level, *sets)

    def copy(self) -> ShardState:
        """Return an independent copy."""
        return replace(
            self, gathered=set(self.gathered), incomplete=set(self.incomplete), unreduced=set(self.unreduced)
        )
