"""Split fused pairs of passes into single passes, for runtimes that run one pass at a time.

Each part may start as soon as its inputs have arrived, and its outputs are sent before the other part has run: with 4
ranks and 16 microbatches DualPipeV then takes 49.5 forwards, not 51 (F = I = W, messages free).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, split_fused


def taken_apart(schedule: Schedule) -> Schedule:
    """Return the schedule with its fused passes split, in the same sequence; unchanged if it has none."""
    if not any(a.op is Op.FUSED for program in schedule.programs for part in program for a in part):
        return schedule
    return replace(schedule, programs=tuple(Program(*map(_apart, program)) for program in schedule.programs))


def _apart(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(split_fused(actions))
