"""Records the lags of waves in the run folder (`combine.lag=record`), and replays them (`combine.lag=FILE`).

lags.json    {"pipeline/stage": {"batch": [lag of the updates of each pipeline]}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.guarded_files import parse_json, read_given, write_whole
from penstock.schedule.methods.wave_lags import RECORD, Record

NAME = "lags.json"


def lag_of(value: int | Sequence[int] | str | None) -> Any:
    """Convert a configured lag to the form that `penstock.schedule.methods.data_parallel_sync.Combine` takes.

    Raises:
        ConfigError: it names a file that cannot be read or has other content.
    """
    return read_lags(Path(value)) if isinstance(value, str) and value != RECORD else value


def read_lags(path: Path) -> Record:
    """Read the lags that a run has recorded.

    Raises:
        ConfigError: the file cannot be read or has other content.
    """
    try:
        found = parse_json(read_given(path))
        return {
            str(place): {int(batch): [int(lag) for lag in lags] for batch, lags in waves.items()}
            for place, waves in found.items()
        }
    except OSError as error:
        raise ConfigError(
            f"combine.lag: cannot read {str(path)!r}: {error.strerror or error}; give a number of waves, one per "
            f"pipeline, {RECORD}, or the {NAME} of a run that recorded it"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"combine.lag: {str(path)!r} is not a {NAME} written by a run: {error}") from None


def write_lags(folder: Path, parts: Iterable[Mapping[str, Any]]) -> None:
    """Write the lags that all processes have recorded into the run folder."""
    write_whole(folder / NAME, json.dumps({place: waves for part in parts for place, waves in part.items()}))
