"""The induction by which what holds for the batches that are played holds for spans of any length.

A schedule is played batch by batch; what exists at a batch border (messages, microbatches, versions, gradients),
numbered relative to the border's batch, is its state. All ranks run the same period again, so once a state repeats,
everything after it repeats, too. (This requires that every action exists and that no version or unit from before the
span is used, so the first periods do not count.) From every border up to there a copy of the state drains the pipeline,
which covers spans of every length.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.stage_state.stage_constants import stage_specs

_LIMIT = 8
"""Batches beyond twice the transient by which every state must have repeated."""


def transient_of(schedule: Schedule) -> int:
    """Return the first batch in whose period no unit, and no version that is read, lies before the span."""
    return max(spec.transient for spec in stage_specs(schedule, older=0))


def first_repeat(schedule: Schedule, before: object, play: Callable[[int], object], what: str) -> int:
    """Play batches until the state at a batch border repeats, and return the batch from which it does.

    Args:
        schedule: that is played.
        before: the state at the border before the first batch.
        play: plays a batch, and returns the state at the border behind it.
        what: the state, in words.

    Raises:
        ScheduleError: it does not repeat.
    """
    transient = transient_of(schedule)
    for t in range(_LIMIT + 2 * transient):
        state = play(t)
        if state == before and t >= transient:
            return t
        before = state
    raise ScheduleError(f"{schedule.name}: the {what} at a batch border still changes after {t + 1} batches")
