"""Insert PREDICTs that blend the version that a forward read with the newest one, for its backward.

A backward of several microbatches has one blend, so it is split where their forwards read different versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Action, Copy, Op, Program, Stage, Unit, WeightRef

BLEND = "i"
"""The label of the blended copies."""

Reads = Mapping[tuple[Stage, int], int]
"""The version, relative to its batch, that the forward of each (stage, microbatch of its batch) reads."""


def divided(program: Program, reads: Reads, microbatches: int) -> Program:
    """Split the backwards of a rank's program so that each belongs to forwards that read one version.

    Args:
        program: the program; only full backwards (B) are split.
        reads: the versions that forwards read.
        microbatches: m.
    """

    def divide(actions: tuple[Action, ...]) -> Iterator[Action]:
        for action in actions:
            if action.op is not Op.B or action.unit.count == 1:
                yield action
                continue
            for first, count in _runs(action, reads, microbatches):
                yield action._replace(unit=action.unit._replace(first=first, count=count))

    return Program(tuple(divide(program.period)), tuple(divide(program.epilogue)))


def _runs(action: Action, reads: Reads, m: int) -> list[tuple[int, int]]:
    """Split the unit of an action into (first microbatch, count) of consecutive microbatches whose forwards read one
    version."""
    runs: list[tuple[int, int]] = []
    before = None
    for number in action.unit.microbatches:
        version = reads.get((action.stage, number % m))
        if runs and version == before:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
        before = version
    return runs


def with_blends(program: Program, reads: Reads, microbatches: int) -> Program:
    """Add a PREDICT directly before each backward, which reads the blend that it makes.

    Args:
        program: a program with STEPs; each backward belongs to forwards that read one version.
        reads: the versions that forwards read.
        microbatches: m.

    Raises:
        ScheduleError: a backward is split into I and W, or fused with another pass.
    """
    trained = {action.stage: action.unit.first for action in program.period if action.op is Op.STEP}

    def place(actions: tuple[Action, ...]) -> Iterator[Action]:
        newest = dict(trained)
        for action in actions:
            if action.op is Op.STEP:
                newest[action.stage] = action.unit.first + 1
            if action.op in (Op.I, Op.W) or any(p.op is not Op.F for p in action.parts):
                raise ScheduleError(
                    f"{action}: a backward on a blend of two versions must be a full backward (B) and not fused"
                )
            if action.op is not Op.B or action.stage not in trained:
                yield action
                continue
            batch, k = divmod(action.unit.first, microbatches)
            blend = WeightRef((reads[action.stage, k] + batch, newest[action.stage]), Copy(BLEND, action.unit.first))
            yield Action(Op.PREDICT, action.stage, Unit(action.unit.first), blend)
            yield action._replace(reads=blend)

    return Program(tuple(place(program.period)), tuple(place(program.epilogue)))
