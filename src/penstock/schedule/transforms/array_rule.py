"""Write a version rule into an order of arrays, as `transforms.apply_version_rule` does with actions."""

from __future__ import annotations

import numpy as np

from penstock.schedule.ir.arrays import (
    BACKWARDS,
    NO_VERSION,
    STEP,
    ActionArrays,
    ArrayOrder,
    ArraySchedule,
    F,
    ProgramArrays,
)
from penstock.schedule.ir.version_rules import Placing, Source, VersionRule


def apply_rule_to_arrays(order: ArrayOrder, rule: VersionRule, microbatches: int, name: str) -> ArraySchedule | None:
    """Insert the updates and annotate every pass with the version it reads.

    Only rules under which all passes of a batch read one version, by their number, are known here; None for others, and
    where an order is not complete, of which `apply_rule` says what is missing.
    """
    versions = {Source.BATCH: 0, Source.PREVIOUS: -1}
    if rule.forward not in versions or rule.backward is not Source.FORWARD or rule.provisional:
        return None
    if rule.step not in (Placing.END, Placing.LATE):
        return None
    programs = []
    for program in order.arrays:
        if not _has_all_forwards(program, microbatches):
            return None
        parts = [part.reading(part.first // microbatches + versions[rule.forward]) for part in program]
        programs.append(_with_steps(ProgramArrays(*parts), rule.step))
    return ArraySchedule.of(order, programs, name=name, microbatches=microbatches, rule=rule.name)


def _has_all_forwards(program: ProgramArrays, m: int) -> bool:
    """Whether the rank runs a forward of every microbatch of which it runs a backward, and forwards where backwards."""
    period = program.period
    keys = period.stage * m + period.first % m
    runs = np.isin(period.op, BACKWARDS)
    drains = program.epilogue.stage * m + program.epilogue.first % m
    return bool(np.isin(np.concatenate([keys[runs], drains]), keys[period.op == F]).all())


def _with_steps(program: ProgramArrays, placing: Placing) -> ProgramArrays:
    for stage in np.unique(program.period.stage[np.isin(program.period.op, BACKWARDS)]).tolist():
        period, epilogue = program
        if placing is Placing.END:
            program = ProgramArrays(ActionArrays.joined([period, _step(stage, 0)]), epilogue)
            continue
        first = int(np.flatnonzero((period.op == F) & (period.stage == stage))[0])
        late = _step(stage, -2)
        program = ProgramArrays(
            ActionArrays.joined([period[:first], late, period[first:]]),
            ActionArrays.joined([late, epilogue, _step(stage, -1)]),
        )
    return program


def _step(stage: int, batch: int) -> ActionArrays:
    return ActionArrays.of([STEP], stage, batch, NO_VERSION)
