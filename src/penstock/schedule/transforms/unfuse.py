"""Fused pairs taken apart, for whoever runs one pass at a time.

Each part may begin as soon as what it needs is there, and what it makes leaves before the other part has run: with 4
ranks and 16 microbatches DualPipeV then takes 49.5 forwards, not 51 (F = I = W, messages free).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, passes


def taken_apart(schedule: Schedule) -> Schedule:
    """The same passes in the same sequence, none of them fused; the schedule itself if it has no pairs."""
    if not any(a.op is Op.FUSED for program in schedule.programs for part in program for a in part):
        return schedule
    return replace(schedule, programs=tuple(Program(*map(_apart, program)) for program in schedule.programs))


def _apart(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(single for action in actions for single in passes(action))
