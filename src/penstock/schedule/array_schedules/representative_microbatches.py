"""A few microbatches of a schedule that stand for all of them in the proof of versions.

The proof plays every pass of every microbatch (`penstock.schedule.stage_state`). Where all passes of a batch on a
stage read the same version (by rules flush, double-buffer and triple-buffer), it is enough to play, on each stage, the
microbatches whose forward is the first or the last of the batch, and those whose backward, half of one or recompute is.
For any other one, k:

    its passes stand between such of the same kind and batch (checked here, in the endless stream of periods;
    epilogues keep the order of that stream, which is checked, too), its forward before its recompute, that before its
    backward, I before W (checked).

    Versions. What k reads has been read by an earlier pass that is played, and will be by a later one. A
    version that is gone never comes back, so it is there between the two.

    Gradients. The gradient of the batch has begun with the first backward, which is played, and its STEP comes
    behind the last one, which is.

    Buffers. A version is kept as long as a forward will read it or a microbatch in flight has. Up to the last
    forward of the batch one that is played will; from then on the microbatch whose backward is the last is in
    flight. So the same versions and gradients are alive at every moment as if all were played, and what is
    counted is the same. Delays are means over passes that are all alike.

What is left out changes neither the first batch whose units all exist (the pass that comes latest is played) nor when
the state repeats. So the proof of what is returned is a proof of the schedule, with the same facts.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.ir.arrays import BACKWARDS, NO_VERSION, STEP, ActionArrays, ArraySchedule, F, I, Numbers, R, W
from penstock.schedule.ir.schedule import Program, Schedule
from penstock.schedule.ir.version_rules import RULES, Source


def representatives(schedule: ArraySchedule) -> Schedule | None:
    """Return the schedule with a few microbatches of each stage.

    Args:
        schedule: that is complete (`penstock.schedule.array_schedules.array_coverage`).

    Returns:
        None where these do not stand for all: the whole schedule has to be played, which may show what is wrong.
    """
    rule = RULES[schedule.rule]
    if rule.forward is not Source.BATCH or rule.backward is not Source.FORWARD or rule.provisional:
        return None
    programs, m = [], schedule.microbatches
    for rank, program in enumerate(schedule.arrays):
        kept = [np.zeros(len(part), dtype=bool) for part in program]
        for stage in schedule.on_rank(rank):
            here = [np.flatnonzero(part.stage == stage.index) for part in program]
            own = [part[places] for part, places in zip(program, here, strict=True)]
            found = _stream(own, here, len(program.period), m, -rule.delay)
            if found is None:
                return None
            for part in (0, 1):
                passes = np.isin(own[part].first % m, found)
                kept[part][here[part]] = (own[part].op == STEP) | passes
        parts = [part[keep].actions(schedule.stages) for part, keep in zip(program, kept, strict=True)]
        programs.append(Program(*parts))
    fields = schedule.name, schedule.microbatches, schedule.stages, schedule.edges, tuple(programs), schedule.rule
    return Schedule(*fields, window=schedule.window)


def _stream(own: list[ActionArrays], places: list[Numbers], length: int, m: int, behind: int) -> Numbers | None:
    """Check the order of a stage's actions in the endless stream of periods; return the microbatches that are kept.

    Args:
        own: the actions of the stage, in the period and in the epilogue.
        places: where these stand.
        length: of the whole period of the rank.
        m: microbatches.
        behind: the version that all passes of batch t read, less t.
    """
    period, epilogue = own
    for part in own:
        if (part.version[part.op != STEP] != (part.first // m + behind)[part.op != STEP]).any():
            return None
        if (part.version[part.op == STEP] != NO_VERSION).any():
            return None
    if (epilogue.op == F).any():
        return None
    when = np.zeros((STEP + 1, m), dtype=np.int64)  # from the start of the period of the own batch, by microbatch
    batch = np.where(period.op == STEP, period.first, period.first // m)
    when[period.op, np.where(period.op == STEP, 0, period.first % m)] = places[0] - batch * length
    if not _in_order(when, period):
        return None
    drained = np.where(epilogue.op == STEP, epilogue.first, epilogue.first // m)
    stream = when[epilogue.op, np.where(epilogue.op == STEP, 0, epilogue.first % m)] + drained * length
    if (np.diff(stream) <= 0).any():  # another order than that of later periods
        return None
    kept = set[int]()
    for op in (F, R, *BACKWARDS):
        numbers = period.first[period.op == op] % m
        if len(numbers):
            kept |= {int(numbers[when[op, numbers].argmin()]), int(numbers[when[op, numbers].argmax()])}
    return np.array(sorted(kept))


def _in_order(when: Numbers, period: ActionArrays) -> bool:
    """Whether each forward stands before its recompute, that before its backward, and I before W."""
    m, again = when.shape[1], (period.op == R).any()
    for op in (R, *BACKWARDS):
        numbers = period.first[period.op == op] % m
        before = when[I if op == W else F if op == R or not again else R, numbers]
        if (before >= when[op, numbers]).any():
            return False
    return True
