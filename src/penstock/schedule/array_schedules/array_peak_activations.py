"""The most activations that ranks of a schedule of arrays hold, counted as in `penstock.schedule.proof.activations`."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from math import lcm

import numpy as np

from penstock.schedule.ir.arrays import STEP, ActionArrays, ArraySchedule, B, F, I, Numbers, ProgramArrays, R, W


def most_held_in_arrays(schedule: ArraySchedule, batches: int, left: Fraction = Fraction(1)) -> list[Fraction]:
    """Return the most that each rank holds in a span of up to `batches` batches, in microbatches on its whole share.

    Args:
        schedule: whose.
        batches: the longest span.
        left: what of a microbatch's activations is left between I and W.
    """
    scale = reduce(lcm, schedule.chunks.values(), 1) * left.denominator
    whole = np.array([scale // schedule.chunks[stage] for stage in schedule.stages])
    late = (whole * left.numerator) // left.denominator
    changes = np.zeros((STEP + 1, len(whole)), dtype=np.int64)
    again = np.array([stage.index in schedule.recomputed for stage in schedule.stages])
    changes[F], changes[R] = np.where(again, 0, whole), np.where(again, whole, 0)
    changes[B], changes[I], changes[W] = -whole, late - whole, -late
    m = schedule.microbatches
    return [Fraction(_most_held(program, changes, batches, m), scale) for program in schedule.arrays]


def _most_held(program: ProgramArrays, changes: Numbers, batches: int, m: int) -> int:
    held = most = 0
    for t in range(batches):
        held, here = _through(program.period, changes, held, t, m)
        most = max(most, here, _through(program.epilogue, changes, held, t + 1, m)[1])
    return most


def _through(actions: ActionArrays, changes: Numbers, held: int, t: int, m: int) -> tuple[int, int]:
    """Return what is held after the actions that exist, and the most while they run."""
    there = actions.first >= np.where(actions.op == STEP, -t, -t * m)
    now = held + np.cumsum(changes[actions.op, actions.stage][there])
    return (int(now[-1]), max(held, int(now.max()))) if len(now) else (held, held)
