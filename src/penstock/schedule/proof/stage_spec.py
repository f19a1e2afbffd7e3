"""What the books of a stage need to know before a schedule is played."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.ir.rules import RULES, Source, VersionRule
from penstock.schedule.ir.schedule import Action, Copy, Op, Schedule, Stage, passes
from penstock.schedule.proof.future_reads import Forwards, forwards_of
from penstock.schedule.transforms.batch_ops import COLLECTIVES


@dataclass(frozen=True)
class StageSpec:
    """What does not change while a stage is played.

    Attributes:
        share: backward passes (microbatches times slices) per batch on this stage; 0 where nothing is trained.
        forwards: what its forwards read, in the order of the program.
        copy_uses: reads of each derived copy per period, by label and microbatch modulo m.
        older: the version that stands for everything before the span, 0 or -1.
        collectives: those of each batch on this stage, in the order in which they must come; an update waits for them.
        admits: this is the first trained stage, where microbatches are admitted.
    """

    stage: Stage
    rule: VersionRule
    microbatches: int
    share: int
    forwards: Forwards
    copy_uses: dict[Copy, int]
    older: int
    recomputed: bool
    sharded: bool
    collectives: tuple[Op, ...]
    admits: bool

    @property
    def decides(self) -> bool:
        """Whether an update waits for what all stages decide together."""
        return Op.DECIDE in self.collectives


def stage_specs(schedule: Schedule, older: int) -> list[StageSpec]:
    """What the books of each stage need to know beforehand."""
    actions: dict[Stage, list[Action]] = {stage: [] for stage in schedule.stages}
    for program in schedule.programs:
        for action in program.period:
            for p in passes(action):
                actions[p.stage].append(p)
    forwards = forwards_of(schedule)
    for here in actions.values():
        _check_labels(here, RULES[schedule.rule])
    first = min((n.index for n, here in actions.items() if any(a.op is Op.STEP for a in here)), default=0)
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
            sharded=any(a.op is Op.GATHER for a in here),
            collectives=tuple(op for op in COLLECTIVES if any(a.op is op for a in here)),
            admits=stage.index == first,
        )
        for stage, here in actions.items()
    ]


def _check_labels(actions: list[Action], rule: VersionRule) -> None:
    """Forwards and backwards have predictions of their own, so no label may serve both.

    Raises:
        ScheduleError: one does.
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
            f"{where}: forwards and backwards read copies of one label, {min(forward & backward)!r}; each pass has a "
            "prediction of its own"
        )


def _copy_uses(actions: list[Action], microbatches: int) -> Counter[Copy]:
    """How often each derived copy is read, by microbatch modulo m (each appears in exactly one period)."""
    return Counter(
        Copy(a.reads.derive.label, a.reads.derive.first % microbatches)
        for a in actions
        if a.reads is not None and a.reads.derive is not None and a.op is not Op.PREDICT
    )
