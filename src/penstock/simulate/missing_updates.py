"""The global staleness of pipelines that agree now and then: which updates of another pipeline forwards do without.

With waves of H batches whose updates are added D waves later (HetPipe, arXiv 2005.14038, section 5), a forward that
reads weights d updates late, right before the end of a wave, lacks H - 1 updates of the wave that has not ended, D H of
those that have not been added, and d of its own delay. Under stashing with H = N_m minibatches in flight, d = H - 1 on
the first rank, which is HetPipe's s_global = (D + 1) (s_local + 1) + s_local - 1 with s_local = N_m - 1.
"""

from __future__ import annotations

from penstock.schedule.ir.arrays import ArraySchedule
from penstock.schedule.ir.schedule import Action, Kind, Op, Schedule, passes


def missing_updates(schedule: Schedule) -> tuple[int, ...] | None:
    """Return the most updates of another pipeline, of batches before its own, that a forward of each rank lacks.

    In a long run, and where no pipeline adds later than it has to. None if pipelines do not agree now and then;
    and of a schedule that is arrays, which has no action for that.

    Args:
        schedule: with an AVERAGE behind each STEP, if they do.
    """
    if isinstance(schedule, ArraySchedule) or Op.AVERAGE not in schedule.operations:
        return None
    return tuple(_on_rank(schedule, [*program.period]) for program in schedule.programs)


def _on_rank(schedule: Schedule, period: list[Action]) -> int:
    actions = [p for action in period for p in passes(action)]
    updated = {a.stage: a.unit.first for a in actions if a.op is Op.STEP}
    not_added = {a.stage: a.unit.every - 1 + updated[a.stage] - a.unit.first for a in actions if a.op is Op.AVERAGE}
    late = [
        not_added[a.stage] + a.unit.first // schedule.microbatches - min(a.reads.versions)
        for a in actions
        if a.op is Op.F and a.unit.kind is Kind.TRAIN and a.reads is not None and a.stage in not_added
    ]
    return max(late, default=0)
