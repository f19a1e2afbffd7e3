"""Lags of `wsp`: the number of waves after which pipelines add the updates of others; chosen, recorded, or replayed.

A number applies to the updates of all pipelines, a sequence has one for each. "record" adds all updates that have
arrived at the end of a wave, at least those that are `distance` waves old, and records the lags: by place (a stage of a
pipeline; each adds independently), and by the batch after which the wave ended. A run that is given such a record as
its lag repeats the recorded run bit for bit, if it is drained at the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.checks import is_whole

RECORD = "record"
Record = Mapping[str, Mapping[int, Sequence[int]]]
"""Place -> batch, counted from the start of training -> lag of the updates of each pipeline."""
Lag = int | Sequence[int] | str | Record


def stage_place(pipeline: int, stage: str) -> str:
    """Return the name of a stage of a pipeline in a record."""
    return f"{pipeline}/{stage}"


def lag_fault(lag: Any, distance: int) -> str | None:
    """Return why a value is not a valid lag, or None if it is."""
    if lag == RECORD:
        return None
    if isinstance(lag, Mapping):
        for place, waves in lag.items():
            for batch, lags in waves.items():
                if not lags or any(not _is_lag(one, distance) for one in lags):
                    return (
                        f"the lags recorded at {place} after batch {batch} are {list(lags)}; they must be whole "
                        f"numbers from 0 to distance={distance}"
                    )
        return None
    if (lags := lag if isinstance(lag, tuple) else (lag,)) and all(_is_lag(one, distance) for one in lags):
        return None
    return (
        f"lag must be a whole number of waves from 0 to distance={distance}, one for each pipeline, {RECORD!r}, "
        f"or recorded lags; got {lag!r:.80}"
    )


def width_fault(lag: Lag, width: int) -> str | None:
    """Return why a lag is not valid for `width` pipelines, or None if it is."""
    if isinstance(lag, tuple) and len(lag) != width:
        return f"lag has {len(lag)} numbers for {width} pipelines; give one for each, or one"
    if isinstance(lag, Mapping):
        widths = {len(lags) for waves in lag.values() for lags in waves.values()}
        if widths - {width}:
            return f"lag was recorded with {max(widths)} pipelines, but this run has {width}"
    return None


def record_fault(lag: Lag | None, places: Iterable[str], every: int, batches: int) -> str | None:
    """Return why a run cannot replay a record of lags, as far as that is known before it begins, or None.

    Args:
        lag: as chosen; anything but a record is valid.
        places: the stages of all pipelines (`stage_place`).
        every: batches per wave.
        batches: batches of the run. Its last wave may end in a drain, for which there is no lag.
    """
    if not isinstance(lag, Mapping):
        return None
    missing = [place for place in places if not lag.get(place)]
    if missing:
        return f"lag was not recorded at {missing[0]} (pipeline/stage) of this run; use the same stages"
    ends = {batch + 1 for waves in lag.values() for batch in waves}
    if any(end % every for end in ends):
        return f"lag was recorded where waves ended after {min(ends)} batches, but here they have {every}"
    if batches // every * every > max(ends) + every:
        return f"lag was recorded in a run of about {max(ends)} batches, but this run has {batches}"
    return None


def parting_fault(lag: Lag | None, directions: int, tied: bool) -> str | None:
    """Return why stages must not add updates independently of each other, or None if they may.

    Args:
        lag: as chosen.
        directions: the number of copies of a stage in a pipeline.
        tied: stages share parameters.
    """
    if lag is None or isinstance(lag, int | tuple) or (directions == 1 and not tied):
        return None
    return (
        "unless lag is a number, each stage adds the updates that have reached it, so stages that hold the same "
        f"parameters ({'tied ones' if tied else 'of two directions'}) would diverge; set, for example, combine.lag=1"
    )


def _is_lag(value: Any, distance: int) -> bool:
    return is_whole(value) and value <= distance
