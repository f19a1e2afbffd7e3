"""The folder of a comparison: its description, and a file for every finished run.

    comparison.json                      schema, settings that all runs share, data, methods, orders of one's own (as
                                         text, so it does not matter what becomes of their files), seeds, rates
    runs/2bw-seed-0-lr-0.003.json        results of one run

A file gets its name only when it is complete, so a comparison may be interrupted at any time: the same command then
continues with the missing runs. Methods, seeds and rates may be added; those that a command does not name stay as they
are. All other settings must be the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checks import finite_or_none
from penstock.compare.config import ComparisonConfig
from penstock.compare.grid import Key, contenders
from penstock.compare.held_out import Score
from penstock.compare.tasks import Task
from penstock.compare.trial import TrialResult
from penstock.errors import ConfigError, DataError
from penstock.guarded_files import write_whole
from penstock.train.config.own_schedule import is_same
from penstock.train.config.sections import special_options

SCHEMA = 1
INDEX = "comparison.json"
RUNS = "runs"
_MISSING = object()


def joined(config: ComparisonConfig, folder: Path) -> ComparisonConfig:
    """Merge a comparison with the methods, seeds and rates that its folder has already.

    Lists that were not given explicitly add nothing to the folder's.

    Raises:
        ConfigError: unknown method, or an order of one's own has changed.
        DataError: the folder's description is damaged.
    """
    if not os.path.exists(folder / INDEX):  # unlike Path.exists, False for a name that is too long
        return config
    there, given = _read(folder / INDEX), config.model_fields_set
    named = [contender.label for contender in contenders(config)] if "methods" in given else []
    rated = "lr" in given or "lr" in config.optimizer.model_fields_set
    changes = {
        "methods": list(dict.fromkeys([*there["methods"], *named])),
        "schedules": _same_schedules(there["schedules"], config.schedules, folder),
        "seeds": max(there["seeds"], config.seeds if "seeds" in given else 0),
        "lr": list(dict.fromkeys([*there["lr"], *(config.rates if rated else ())])),
        "tune": config.tune if "tune" in given else there.get("tune"),
    }
    return config.model_copy(update=changes)


def _same_schedules(there: Mapping[str, str], now: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return all orders of one's own, those of the folder and new ones.

    Raises:
        ConfigError: one of them is not what it was.
    """
    for name in there.keys() & now.keys():
        if not is_same(there[name], now[name]):
            raise ConfigError(
                f"--out {str(folder)!r} has results of another {name}: its file has changed since. Give it another "
                "name, or use another folder"
            )
    return {**now, **there}


class Records:
    """Reads and writes the results of one comparison.

    Args:
        folder: may exist, with earlier results.
        config: of the comparison, `joined` with the folder's.
        task: its model and data.

    Raises:
        ConfigError: the folder holds another comparison, or something else.
    """

    def __init__(self, folder: Path, config: ComparisonConfig, task: Task) -> None:
        self.folder = folder
        self._shared = _plain({**config.shared, "data found": task.fingerprint})
        self._listed = {
            "methods": [c.label for c in contenders(config)],
            "schedules": config.schedules,
            "seeds": config.seeds,
            "lr": list(config.rates),
            "tune": config.tune,
        }
        if os.path.exists(folder / INDEX):
            self._compare(_read(folder / INDEX)["shared"], config)
        elif os.path.isdir(folder) and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ConfigError(
                f"--out {str(folder)!r} has other files in it but no comparison; give a new or empty folder"
            )

    def begin(self) -> None:
        """Make the folder and write the description of the comparison.

        Raises:
            ConfigError: it cannot be written.
        """
        index = {"schema": SCHEMA, "shared": self._shared, **self._listed}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / INDEX, json.dumps(index, indent=1))
            (self.folder / RUNS).mkdir(exist_ok=True)
        except OSError as error:
            why = "it is a file; give a folder" if os.path.isfile(self.folder) else error.strerror or error
            raise ConfigError(f"cannot write to --out {str(self.folder)!r}: {why}") from None

    def _compare(self, there: dict[str, Any], config: ComparisonConfig) -> None:
        """Check that the folder holds the same comparison.

        A key that an earlier version did not know counts as its default; but the optimizer may have done something else
        before it had an option.
        """
        special = {f"optimizer.{key}" for key in special_options(config.optimizer.name)}
        defaults, now = _flat(_plain(ComparisonConfig().shared)), _flat(self._shared)
        before = {key: value for key, value in defaults.items() if key not in special} | _flat(there)
        differing = [
            f"{key} is {_shown(before.get(key, _MISSING))} there and {_shown(now.get(key, _MISSING))} now"
            for key in dict.fromkeys([*before, *now])
            if before.get(key, _MISSING) != now.get(key, _MISSING)
        ]
        if differing:
            raise ConfigError(
                f"--out {str(self.folder)!r} holds another comparison: {'; '.join(differing)}. Use the same settings "
                "(methods, seeds and rates may be added), or another folder"
            )

    def load(self, key: Key) -> TrialResult | None:
        """Return the result of a run; None if it has not finished.

        Raises:
            DataError: its file is damaged.
        """
        path = self.folder / RUNS / key.file
        if not path.exists():
            return None
        try:
            found = _read(path)
            scores = (Score(s["updates"], _number(s["loss"]), s["accuracy"]) for s in found["scores"])
            losses, norms = (tuple(map(_number, found[what])) for what in ("losses", "norms"))
            return TrialResult(key, tuple(scores), losses, norms, found["diverged"], found["seconds"])
        except (KeyError, TypeError) as error:
            raise DataError(f"{str(path)!r} is damaged ({error!r}); remove it to train that run again") from None

    def save(self, result: TrialResult) -> None:
        """Write the result of a run.

        Raises:
            ConfigError: it cannot be written.
        """
        values = {
            "schema": SCHEMA,
            **result.key._asdict(),
            "diverged": result.diverged,
            "seconds": result.seconds,
            "scores": [{**score._asdict(), "loss": finite_or_none(score.loss)} for score in result.scores],
            "losses": [finite_or_none(loss) for loss in result.losses],
            "norms": [finite_or_none(norm) for norm in result.norms],
        }
        path = self.folder / RUNS / result.key.file
        try:
            write_whole(path, json.dumps(values, indent=1))
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{str(path)!r} is damaged ({error}); remove it") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise DataError(f"{str(path)!r} has schema {schema}, this version of penstock reads {SCHEMA}")
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to keys of the form `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are read from a file again."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _shown(value: Any) -> str:
    return "unknown" if value is _MISSING else "not set" if value is None else str(value)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
