"""Post-validation: updates before the global decision, repaired if it rejects them (arXiv 2401.10241, sec. 4).

A STEP that waits for no other stage creates a provisional version. Until VALIDATE has accepted or rejected it, only
forwards may read it; these are called drafts. If the version is rejected, the update is repeated, and directly after
VALIDATE every rank recomputes its drafts (REDO), in their order. The outputs of drafts are sent again, as messages of
their own (`Payload.REPAIR`); a rank that received the activation of a draft receives its repair as well.

So the branch after a rejection is the period with additional instructions, and is proven like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, Stage, passes
from penstock.schedule.transforms.batch_ops import batch_unit

Draft = tuple[Stage, int]
"""A forward of a provisional version, by its stage and its microbatch within the batch."""


def with_validations(program: Program, stages: Sequence[Stage]) -> Program:
    """Add a VALIDATE for each stage as late as possible: before the first backward, and before the last forward.

    It must come before the last forward because that forward creates the report of the batch.

    Args:
        program: the program of a rank, with STEPs at the end of its period.
        stages: the trained stages of the rank, at least one.
    """
    backwards = [i for i, a in enumerate(program.period) if any(p.op in (Op.B, Op.I, Op.W) for p in passes(a))]
    forwards = [i for i, a in enumerate(program.period) if any(p.op is Op.F for p in passes(a))]
    place = min([*backwards[:1], *forwards[-1:]])
    found = tuple(Action(Op.VALIDATE, stage, batch_unit(-1)) for stage in stages)
    return Program((*program.period[:place], *found, *program.period[place:]), (*found, *program.epilogue))


def redone(schedule: Schedule) -> tuple[Schedule, frozenset[Draft]]:
    """Return the schedule with a REDO of every draft, and the drafts; without a VALIDATE there are none.

    Raises:
        ScheduleError: the VALIDATEs of a rank are not adjacent, forwards before them are of slices or fused, or they
            decide on a batch of the same period.
    """
    programs, drafts = [], set()
    for rank, (period, epilogue) in enumerate(schedule.programs):
        places = [i for i, a in enumerate(period) if a.op is Op.VALIDATE]
        if not places:
            programs.append(Program(period, epilogue))
            continue
        if schedule.slices > 1:
            raise ScheduleError(f"{schedule.name}: post-validation does not support sequence slices")
        if len(places) != places[-1] - places[0] + 1:
            raise ScheduleError(f"{schedule.name}: the VALIDATEs of rank {rank} must be adjacent")
        early = period[: places[0]]
        fused = next((a for a in early if a.parts), None)
        if fused is not None or any(period[place].unit.first >= 0 for place in places):
            what = f"{fused} is fused" if fused is not None else "it decides on a batch of this period"
            raise ScheduleError(
                f"{schedule.name}: VALIDATE of rank {rank} must decide on an earlier batch, and the forwards before it "
                f"must not be fused, so that they can be repeated; {what}"
            )
        before = [a for a in early if a.op is Op.F and a.unit.first >= 0]
        drafts |= {(a.stage, k) for a in before for k in a.unit.microbatches}
        again = tuple(a._replace(op=Op.REDO) for a in before)
        programs.append(Program((*period[: places[-1] + 1], *again, *period[places[-1] + 1 :]), epilogue))
    return replace(schedule, programs=tuple(programs)), frozenset(drafts)
