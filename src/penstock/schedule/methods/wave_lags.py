"""After how many waves pipelines add what others have changed (`wsp`): chosen, taken down, or as taken down.

A number is for the updates of all pipelines, a sequence has one for each. "record" takes whatever has come at the end
of a wave, at least what is `distance` waves old, and takes the lags down: by place (a stage of a pipeline, each of
which takes for itself), and by the batch after which the wave ended. Such a record, given as lag, makes the same run
again, bit for bit, if that is drained at the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RECORD = "record"
Record = Mapping[str, Mapping[int, Sequence[int]]]
"""Place -> batch, counted from the start of training -> lag of the updates of each pipeline."""
Lag = int | Sequence[int] | str | Record


def place_of(pipeline: int, stage: str) -> str:
    """What a stage of a pipeline is called in a record."""
    return f"{pipeline}/{stage}"


def lag_fault(lag: Any, distance: int) -> str | None:
    """Why it cannot be a lag, or None."""
    if lag == RECORD:
        return None
    if isinstance(lag, Mapping):
        for place, waves in lag.items():
            for batch, lags in waves.items():
                if not lags or any(not _is_lag(one, distance) for one in lags):
                    return (
                        f"the lags taken down at {place} after batch {batch} are {list(lags)}; they must be whole "
                        f"numbers from 0 to distance={distance}"
                    )
        return None
    if (lags := lag if isinstance(lag, tuple) else (lag,)) and all(_is_lag(one, distance) for one in lags):
        return None
    return (
        f"lag must be a whole number of waves from 0 to distance={distance}, or one for each pipeline, or {RECORD!r}, "
        f"or what that has taken down; got {lag!r:.80}"
    )


def width_fault(lag: Lag, width: int) -> str | None:
    """Why it cannot be a lag for so many pipelines, or None."""
    if isinstance(lag, tuple) and len(lag) != width:
        return f"lag has {len(lag)} numbers for {width} pipelines; give one for each, or one"
    if isinstance(lag, Mapping):
        widths = {len(lags) for waves in lag.values() for lags in waves.values()}
        if widths - {width}:
            return f"lag was taken down with {max(widths)} pipelines, and here are {width}"
    return None


def record_fault(lag: Lag | None, places: Iterable[str], every: int, batches: int) -> str | None:
    """Why a run cannot take the lags of a record, as far as that is known before it begins, or None.

    Args:
        lag: as chosen; any but a record is fine.
        places: the stages of all pipelines (`place_of`).
        every: batches of a wave.
        batches: of the run. How many of its last waves end in a drain, without a lag, is not known; one may.
    """
    if not isinstance(lag, Mapping):
        return None
    missing = [place for place in places if not lag.get(place)]
    if missing:
        return f"lag was not taken down at {missing[0]} (pipeline/stage), which this run has; give it the same stages"
    ends = {batch + 1 for waves in lag.values() for batch in waves}
    if any(end % every for end in ends):
        return f"lag was taken down where waves ended after {min(ends)} batches, and here they have {every}"
    if batches // every * every > max(ends) + every:
        return f"lag was taken down in a run of about {max(ends)} batches, and this one is to have {batches}"
    return None


def parting_fault(lag: Lag | None, directions: int, tied: bool) -> str | None:
    """Why stages cannot take each for itself, or None.

    Args:
        lag: as chosen.
        directions: how many copies of a stage a pipeline holds.
        tied: stages share parameters.
    """
    if lag is None or isinstance(lag, int | tuple) or (directions == 1 and not tied):
        return None
    return (
        "with a lag that is not chosen each stage takes what has come to it, so those that hold the same parameters "
        f"({'tied ones' if tied else 'of two directions'}) would part; choose a lag, such as combine.lag=1"
    )


def _is_lag(value: Any, distance: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= distance
