"""A schedule as one rank of a job holds it: what is said of all ranks, and the actions of its own.

Another rank has built the schedule. What a rank needs of the others' programs are a few facts, which grow with the
stages and not with the microbatches; they travel as plain values. Whoever looks at all programs has them built then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from penstock.schedule.ir.schedule import Edge, Op, Program, Schedule, Stage
from penstock.schedule.ir.sharding import read_sharding

Json = Any
"""A value of numbers, texts, lists and None, as `json.loads` returns it."""


class RankSchedule(Schedule):
    """A schedule of which the program of one rank is known, and others are built when somebody asks for them."""

    _rank = -1
    _own: Program | None = None
    _ranks: int | None = None
    _build: Callable[[], Schedule]

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """What each rank runs; built at the first look."""
        return self._build().programs

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.programs) if self._ranks is None else self._ranks

    def program(self, rank: int) -> Program:
        """Return what a rank runs; nothing is built for that of this one."""
        return self._own if rank == self._rank and self._own is not None else self.programs[rank]

    def held_by(self, rank: int, own: Program) -> RankSchedule:
        """Return the same with the program of a rank."""
        held = RankSchedule.__new__(RankSchedule)
        held.__dict__.update(self.__dict__, _rank=rank, _own=own)
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the whole schedule be pickled or copied in place of this one, whose way to build it cannot be."""
        return Schedule, _whole_fields(self)

    def __eq__(self, other: object) -> bool:
        """Compare with another schedule, of which it may be a part; this builds both."""
        return isinstance(other, Schedule) and whole(self) == whole(other)

    def __hash__(self) -> int:
        """Return the hash of the whole schedule."""
        return hash(whole(self))


def whole(schedule: Schedule) -> Schedule:
    """Return a schedule with the programs of all ranks."""
    if not isinstance(schedule, RankSchedule):
        return schedule
    return Schedule(*_whole_fields(schedule))


def _whole_fields(schedule: Schedule) -> tuple[Any, ...]:
    return tuple([getattr(schedule, name) for name in Schedule.__dataclass_fields__])


def schedule_facts(schedule: Schedule) -> Json:
    """Return what all ranks need of a schedule."""
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "stages": [list(stage) for stage in schedule.stages],
        "edges": [[source, target, int(backward)] for source, target, backward in schedule.edges],
        "rule": schedule.rule,
        "frozen": sorted(schedule.frozen),
        "segments": [list(segment) for segment in schedule.segments],
        "window": schedule.window,
        "sharding": str(schedule.sharding),
        "ranks": schedule.ranks,
        "recomputed": sorted(schedule.recomputed),
        "slices": schedule.slices,
        "operations": sorted(op.value for op in schedule.operations),
        "deciding": [list(stage) for stage in schedule.deciding],
        "first_trained": schedule.first_trained,
        "actions": schedule.actions_hash,
    }


def rank_schedule(facts: Json, build: Callable[[], Schedule]) -> RankSchedule:
    """Return the schedule that another rank has built.

    Args:
        facts: what `schedule_facts` returned there.
        build: builds the same one here, if that is ever asked for.
    """
    found = RankSchedule.__new__(RankSchedule)
    found.__dict__.update(
        name=facts["name"],
        microbatches=facts["microbatches"],
        stages=tuple([Stage(*stage) for stage in facts["stages"]]),
        edges=tuple([Edge(source, target, bool(backward)) for source, target, backward in facts["edges"]]),
        rule=facts["rule"],
        frozen=frozenset(facts["frozen"]),
        segments=tuple([tuple(segment) for segment in facts["segments"]]),
        window=facts["window"],
        sharding=read_sharding(facts["sharding"]),
        recomputed=frozenset(facts["recomputed"]),
        slices=facts["slices"],
        operations=frozenset(map(Op, facts["operations"])),
        deciding=tuple([Stage(*stage) for stage in facts["deciding"]]),
        first_trained=facts["first_trained"],
        actions_hash=facts["actions"],
        _ranks=facts["ranks"],
        _build=build,
    )
    return found
