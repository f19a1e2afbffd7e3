"""The constants of a stage that the proof derives before it plays a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ScheduleError
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.schedule import Action, Copy, Op, Schedule, Stage, split_fused
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Source, VersionRule
from penstock.schedule.transforms.batch_ops import COLLECTIVES


@dataclass(frozen=True)
class StageSpec:
    """The constants of a stage while it is played.

    Attributes:
        share: backward passes (microbatches times slices) per batch on this stage; 0 where nothing is trained.
        forwards: the versions that its forwards read, in the order of the program.
        copy_uses: reads of each derived copy per period, by label and microbatch modulo m.
        older: the number of the version that represents everything before the span, from minus the delay to 0.
        collectives: the collectives of each batch on this stage in their required order; an update waits for them.
        admits: True for the first trained stage, where microbatches are admitted.
        sharding: what is split over parallel pipelines.
        transient: the first batch in whose period nothing that its actions work on, or read, lies before the span.
        swaps: True if its optimizer state is in the memory of the host between two updates.
        alone: True if its rank holds no other stage, so that its actions need not name it.
    """

    stage: Stage
    rule: VersionRule
    microbatches: int
    share: int
    forwards: Forwards
    copy_uses: dict[Copy, int]
    older: int
    recomputed: bool
    sharding: Level
    collectives: tuple[Op, ...]
    admits: bool
    transient: int
    swaps: bool
    alone: bool

    @property
    def decides(self) -> bool:
        """True if an update waits for a decision of all stages."""
        return Op.DECIDE in self.collectives


def stage_specs(schedule: Schedule, older: int, ranks: Collection[int] | None = None) -> list[StageSpec]:
    """Derive the constants of each stage.

    Args:
        schedule: whose stages.
        older: see `StageSpec`.
        ranks: whose stages; those of all ranks if None.
    """
    ranks = range(schedule.ranks) if ranks is None else ranks
    actions: dict[Stage, list[Action]] = {stage: [] for stage in schedule.stages if stage.rank in ranks}
    for rank in ranks:
        for p in schedule.program(rank).passes():
            actions[p.stage].append(p)
    forwards = forwards_of(schedule, ranks)
    for here in actions.values():
        _check_labels(here, RULES[schedule.rule])
    sharded = schedule.sharding.level is not Level.NONE  # then no pipeline has the whole gradient by itself
    return [
        StageSpec(
            stage,
            RULES[schedule.rule],
            schedule.microbatches,
            share=sum(a.unit.count for a in here if a.op in (Op.B, Op.W)),
            forwards=forwards[stage],
            copy_uses=_copy_uses(here, schedule.microbatches),
            older=older,
            recomputed=stage.index in schedule.recomputed,
            sharding=schedule.sharding.level,
            collectives=tuple(
                op for op in COLLECTIVES if any(a.op is op for a in here) or (sharded and op is Op.REDUCE)
            ),
            admits=stage.index == schedule.first_trained,
            transient=_transient(here, schedule.microbatches),
            swaps=any(a.op is Op.SWAPIN for a in here),
            alone=len(schedule.on_rank(stage.rank)) == 1,
        )
        for stage, here in actions.items()
    ]


def _check_labels(actions: list[Action], rule: VersionRule) -> None:
    """Check that no label serves forwards and backwards, which have different predictions.

    Raises:
        ScheduleError: a label is read by both.
    """
    if not rule.forward is rule.backward is Source.COPY:
        return
    forward, backward = (
        {a.reads.derive.label for a in actions if a.op in ops and a.reads is not None and a.reads.derive is not None}
        for ops in ((Op.F,), (Op.B, Op.I, Op.W))
    )
    if forward & backward:
        where = f"stage {actions[0].stage.name} on rank {actions[0].stage.rank}"
        raise ScheduleError(
            f"{where}: forwards and backwards read copies of one label, {min(forward & backward)!r}; each needs a "
            "prediction of its own"
        )


def _transient(actions: list[Action], microbatches: int) -> int:
    begins = [since(action.unit, microbatches) for action in actions]
    reads = [-min(action.reads.versions) for action in actions if action.reads is not None]
    return max([0, *begins, *reads])


def _copy_uses(actions: list[Action], microbatches: int) -> Counter[Copy]:
    """Count the reads of each derived copy, by microbatch modulo m (each appears in exactly one period)."""
    return Counter(
        Copy(a.reads.derive.label, a.reads.derive.first % microbatches)
        for a in actions
        if a.reads is not None and a.reads.derive is not None and a.op is not Op.PREDICT
    )


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
