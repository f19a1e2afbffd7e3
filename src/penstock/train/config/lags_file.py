"""Lags of waves in the folder of a run: `combine.lag=record` leaves them there, `combine.lag=FILE` takes them again.

lags.json    {"pipeline/stage": {"batch": [lag of the updates of each pipeline]}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.methods.wave_lags import RECORD, Record

NAME = "lags.json"


def lag_of(value: int | Sequence[int] | str | None) -> Any:
    """What a configuration means by a lag, as `penstock.schedule.methods.combine.Combine` takes it.

    Raises:
        ConfigError: it names a file that cannot be read, or holds something else.
    """
    return read_lags(Path(value)) if isinstance(value, str) and value != RECORD else value


def read_lags(path: Path) -> Record:
    """What a run has taken down.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text())
        return {
            str(place): {int(batch): [int(lag) for lag in lags] for batch, lags in waves.items()}
            for place, waves in found.items()
        }
    except OSError as error:
        raise ConfigError(
            f"combine.lag: cannot read {str(path)!r}: {error.strerror or error}; give a number of waves, one for each "
            f"pipeline, {RECORD}, or the {NAME} of a run with that"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"combine.lag: {str(path)!r} is not a {NAME} that a run has written: {error}") from None


def write_lags(folder: Path, parts: Iterable[Mapping[str, Any]]) -> None:
    """Leave what all processes have taken down in the folder of their run."""
    (folder / NAME).write_text(json.dumps({place: waves for part in parts for place, waves in part.items()}))
