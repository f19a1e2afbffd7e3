"""Whether a schedule of arrays is complete, as `penstock.schedule.proof.coverage` proves it action by action."""

from __future__ import annotations

import numpy as np

from penstock.schedule.ir.arrays import OPERATIONS, STEP, ArraySchedule, B, F, I, Numbers, ProgramArrays, R, W


def is_complete(schedule: ArraySchedule) -> bool:
    """Whether every batch gets all its passes and updates exactly once, and epilogues what is left of the last ones.

    Where it is not, `check_coverage` says what is wrong.
    """
    stages, m = schedule.stages, schedule.microbatches
    if m < 1 or [stage.index for stage in stages] != list(range(len(stages))) or any(n.direction for n in stages):
        return False
    return all(_is_complete(program, schedule, rank) for rank, program in enumerate(schedule.arrays))


def _is_complete(program: ProgramArrays, schedule: ArraySchedule, rank: int) -> bool:
    m, own = schedule.microbatches, np.array([stage.index for stage in schedule.on_rank(rank)])
    for part, begun in zip(program, (1, 0), strict=True):
        last = np.where(part.op == STEP, begun - 1, begun * m - 1)  # of a batch that has begun
        if not np.isin(part.stage, own).all() or (part.first > last).any():
            return False
    local = np.zeros(len(schedule.stages), dtype=np.int64)
    local[own] = np.arange(len(own))
    period = program.period
    passes = period[period.op != STEP]
    keys = (local[passes.stage] * len(OPERATIONS) + passes.op) * m + passes.first % m
    counts = np.bincount(keys, minlength=len(own) * len(OPERATIONS) * m).reshape(len(own), len(OPERATIONS), m)
    forwards, wholes, inputs, weights, again = (counts[:, op] for op in (F, B, I, W, R))
    steps = np.bincount(local[period.stage[period.op == STEP]], minlength=len(own))
    once = (forwards == 1).all() and (wholes + inputs == 1).all() and (inputs == weights).all()
    recomputes = np.array([stage.index in schedule.recomputed for stage in schedule.on_rank(rank)])
    return bool(once and (again == recomputes[:, None]).all() and (steps == 1).all() and _drains(program, m))


def _drains(program: ProgramArrays, m: int) -> bool:
    """Whether the epilogue runs once what periods of later batches would run of those before."""
    period, epilogue = program
    late = period[period.first < 0]
    step = np.where(late.op == STEP, 1, m)
    times = -(late.first // step)
    offsets = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    first = late.first.repeat(times) + offsets * step.repeat(times)
    wanted = _keys(late.op.repeat(times), late.stage.repeat(times), first)
    found = _keys(epilogue.op, epilogue.stage, epilogue.first)
    return wanted.shape == found.shape and bool((np.sort(wanted) == np.sort(found)).all())


def _keys(op: Numbers, stage: Numbers, first: Numbers) -> Numbers:
    """Return a number for each action; no two have the same."""
    return ((stage.astype(np.int64) * len(OPERATIONS) + op) << 40) + first  # microbatches are below 2^40
