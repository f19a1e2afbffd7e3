"""Schedules in which the passes of one stage are tried."""

from __future__ import annotations

from functools import partial

from penstock.schedule.build import ScheduleRequest

_MICROBATCHES = 2
_MICROBATCHES_TO_MOVE = 3  # with fewer a backward comes too early


def schedule_to_try(depth: int, halved: bool, moved: bool, slices: int) -> ScheduleRequest:
    """Return a schedule with what is tried; arguments as of `StageTrial`."""
    microbatches = _MICROBATCHES_TO_MOVE if moved else _MICROBATCHES
    if slices > 1:
        if halved:
            return ScheduleRequest(partial(_halves_of_slices, slices), depth, microbatches)
        return ScheduleRequest("terapipe", depth, microbatches, options={"slices": slices})
    whole = "gpipe" if moved else "1f1b"
    return ScheduleRequest(_halves if halved else whole, depth, microbatches)


def _halves(stages: int, microbatches: int) -> list[str]:
    """Return an order in which no second half of a backward follows its first one, so that all are halved."""
    parts = (" ".join(f"{op}{k}" for k in range(microbatches)) for op in "FIW")
    return [" ".join(parts)] * stages


def _halves_of_slices(slices: int, stages: int, microbatches: int) -> list[str]:
    """Return the same for slices of sequences."""
    forwards = [f"{k}:{j}/{slices}" for k in range(microbatches) for j in range(slices)]
    backwards = [f"{k}:{j}/{slices}" for k in range(microbatches) for j in reversed(range(slices))]
    parts = [*(f"F{unit}" for unit in forwards), *(f"{op}{unit}" for op in "IW" for unit in backwards)]
    return [" ".join(parts)] * stages
