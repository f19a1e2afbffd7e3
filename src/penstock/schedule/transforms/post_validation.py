"""Steps before the decision, and what happens when they were wrong (Qi et al., arXiv 2401.10241, sec. 4).

A STEP that waits for no other stage bears a provisional version. Until VALIDATE has decided on it, only forwards may
read it: they are drafts. Where the version is rejected, the update is made again, and directly after VALIDATE every
rank runs its drafts again (REDO), in their order. What was made of drafts travels again, as a message of its own
(`Payload.REPAIR`); whoever takes an activation that a draft has made takes its repair as well.

So the branch after a rejection is the period with some instructions more, and is proven like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, Stage, passes
from penstock.schedule.transforms.batch_ops import batch_unit

Draft = tuple[Stage, int]
"""A forward by its stage and microbatch, counted through its batch."""


def with_validations(program: Program, stages: Sequence[Stage]) -> Program:
    """A VALIDATE for each stage as late as it may stand: before the first backward, and before the last forward.

    (Before the last forward, because it makes the report of the batch.)

    Args:
        program: of a rank, with STEPs at the end of its period.
        stages: those of the rank that are trained, at least one.
    """
    backwards = [i for i, a in enumerate(program.period) if any(p.op in (Op.B, Op.I, Op.W) for p in passes(a))]
    forwards = [i for i, a in enumerate(program.period) if any(p.op is Op.F for p in passes(a))]
    place = min([*backwards[:1], *forwards[-1:]])
    found = tuple(Action(Op.VALIDATE, stage, batch_unit(-1)) for stage in stages)
    return Program((*program.period[:place], *found, *program.period[place:]), (*found, *program.epilogue))


def redone(schedule: Schedule) -> tuple[Schedule, frozenset[Draft]]:
    """The schedule with a REDO of every draft, and the drafts; without a VALIDATE there are none.

    Raises:
        ScheduleError: something stands between the VALIDATEs of a rank, forwards before them are of slices or fused, or
            they decide on a batch of the same period.
    """
    programs, drafts = [], set()
    for rank, (period, epilogue) in enumerate(schedule.programs):
        places = [i for i, a in enumerate(period) if a.op is Op.VALIDATE]
        if not places:
            programs.append(Program(period, epilogue))
            continue
        if schedule.slices > 1:
            raise ScheduleError(f"{schedule.name}: versions cannot be provisional where sequences are cut into slices")
        if len(places) != places[-1] - places[0] + 1:
            raise ScheduleError(f"{schedule.name}: the VALIDATEs of rank {rank} must stand next to each other")
        early = period[: places[0]]
        fused = next((a for a in early if a.parts), None)
        if fused is not None or any(period[place].unit.first >= 0 for place in places):
            what = f"{fused} is fused" if fused is not None else "it decides on a batch of this period"
            raise ScheduleError(
                f"{schedule.name}: VALIDATE of rank {rank} decides on an earlier batch, behind single forwards "
                f"that can be run again; {what}"
            )
        before = [a for a in early if a.op is Op.F and a.unit.first >= 0]
        drafts |= {(a.stage, k) for a in before for k in a.unit.microbatches}
        again = tuple(a._replace(op=Op.REDO) for a in before)
        programs.append(Program((*period[: places[-1] + 1], *again, *period[places[-1] + 1 :]), epilogue))
    return replace(schedule, programs=tuple(programs)), frozenset(drafts)
