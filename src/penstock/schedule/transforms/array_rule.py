"""Write a version rule, or recomputes, into arrays, as `apply_version_rule` and `recompute` do with actions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.ir.arrays import (
    BACKWARDS,
    NO_VERSION,
    STEP,
    ActionArrays,
    ArrayOrder,
    ArraySchedule,
    B,
    F,
    I,
    ProgramArrays,
    R,
)
from penstock.schedule.ir.version_rules import RULES, Placing, Source, VersionRule


def apply_rule_to_arrays(order: ArrayOrder, rule: VersionRule, microbatches: int, name: str) -> ArraySchedule | None:
    """Insert the updates and annotate every pass with the version it reads.

    Only rules under which all passes of a batch read one version, by their number, are known here; None for others, and
    where an order is not complete, of which `apply_rule` says what is missing.
    """
    if rule.forward is not Source.BATCH or rule.backward is not Source.FORWARD or rule.provisional:
        return None
    if rule.step not in (Placing.END, Placing.LATE):
        return None
    programs = []
    for program in order.arrays:
        if not _has_all_forwards(program, microbatches):
            return None
        parts = [part.reading(part.first // microbatches - rule.delay) for part in program]
        programs.append(_with_steps(ProgramArrays(*parts), rule, microbatches))
    return ArraySchedule.of(order, programs, name=name, microbatches=microbatches, rule=rule.name)


def _has_all_forwards(program: ProgramArrays, m: int) -> bool:
    """Whether the rank runs a forward of every microbatch of which it runs a backward, and forwards where backwards."""
    period = program.period
    keys = period.stage * m + period.first % m
    runs = np.isin(period.op, BACKWARDS)
    drains = program.epilogue.stage * m + program.epilogue.first % m
    return bool(np.isin(np.concatenate([keys[runs], drains]), keys[period.op == F]).all())


def _with_steps(program: ProgramArrays, rule: VersionRule, m: int) -> ProgramArrays:
    for stage in np.unique(program.period.stage[np.isin(program.period.op, BACKWARDS)]).tolist():
        period, epilogue = program
        if rule.step is Placing.END:
            program = ProgramArrays(ActionArrays.joined([period, _step(stage, 0)]), epilogue)
            continue
        first = int(np.flatnonzero((period.op == F) & (period.stage == stage))[0])
        late, *between, last = (_step(stage, -back) for back in range(rule.delay + 1, 0, -1))
        borders = [_drained_before(program, first + later * len(period), m) for later in range(1, rule.delay)]
        parts = [epilogue[a:b] for a, b in pairwise([0, *borders, len(epilogue)])]
        drained = [parts[0], *(each for both in zip(between, parts[1:], strict=True) for each in both)]
        program = ProgramArrays(
            ActionArrays.joined([period[:first], late, period[first:]]),
            ActionArrays.joined([late, *drained, last]),
        )
    return program


def _drained_before(program: ProgramArrays, border: int, m: int) -> int:
    """Return how many actions of the epilogue would stand before a place, counted from batch T, if batches followed."""
    period, epilogue = program
    length = len(period)
    shape = STEP + 1, 1 + max(period.stage.max(), epilogue.stage.max(initial=0)), m
    when = np.zeros(shape, dtype=np.int64)
    when[period.op, period.stage, period.first % m] = np.arange(length) - period.first // m * length
    stream = when[epilogue.op, epilogue.stage, epilogue.first % m] + epilogue.first // m * length
    before = np.flatnonzero((stream < border) & (epilogue.op != STEP))
    return int(before.max(initial=-1)) + 1


def recompute_in_arrays(schedule: ArraySchedule, stages: Collection[int] | None) -> ArraySchedule | None:
    """Add a recompute directly before each backward of the stages whose backwards do not all follow their forwards.

    Args:
        schedule: without recomputes.
        stages: which of them may recompute, by index; all if None.

    Returns:
        None where a recompute reads other weights than the backward.
    """
    if RULES[schedule.rule].recompute is not Source.FORWARD:
        return None
    later = set[int]()
    for program in schedule.arrays:
        whole = ActionArrays.joined(program)
        before = [np.append(-1, column[:-1]) for column in (whole.stage, whole.first, whole.version)]
        same = [a == b for a, b in zip(before, (whole.stage, whole.first, whole.version), strict=True)]
        follows = np.logical_and.reduce(same) & (np.append(STEP, whole.op[:-1]) != STEP)
        later |= set(whole.stage[_begins_backward(whole) & ~follows].tolist())
    places = [i for i in later if stages is None or schedule.stages[i].index in stages]
    return schedule.with_arrays(
        [ProgramArrays(*(_recomputing(part, places) for part in program)) for program in schedule.arrays]
    )


def _begins_backward(actions: ActionArrays) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (actions.op == B) | (actions.op == I)
    return found


def _recomputing(actions: ActionArrays, stages: Sequence[int]) -> ActionArrays:
    """Put a recompute before each backward of these stages."""
    again = _begins_backward(actions) & np.isin(actions.stage, stages)
    doubled = actions[np.repeat(np.arange(len(actions)), 1 + again)]
    first = np.flatnonzero(again) + np.arange(again.sum())
    op = doubled.op.copy()
    op[first] = R
    return ActionArrays(op, doubled.stage, doubled.first, doubled.version)


def _step(stage: int, batch: int) -> ActionArrays:
    return ActionArrays.of([STEP], stage, batch, NO_VERSION)
