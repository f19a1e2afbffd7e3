"""The folder of a comparison: its description, and a run folder of `penstock train` for every run.

    comparison.json                      schema, data, configuration (with orders and methods of one's own as text, so
                                         it does not matter what becomes of their files)
    runs/2bw-seed-0-lr-0.003/            one run

A comparison may be interrupted at any time: the same command then continues with the missing runs. Contenders, seeds
and rates may be added; those that a command does not name stay as they are. All other settings must be the same.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.compare.config import ComparisonConfig, default_contenders
from penstock.errors import ConfigError, DataError
from penstock.guarded_files import write_whole
from penstock.train.config.load import validate
from penstock.train.config.own_schedule import is_same
from penstock.train.config.written_config import flat_config, on_one_line

SCHEMA = 2
INDEX = "comparison.json"
RUNS = "runs"
_MAY_GROW = ("methods", "contenders", "seeds", "lr", "tune", "optimizer.lr")


def joined(config: ComparisonConfig, folder: Path) -> ComparisonConfig:
    """Merge a comparison with the contenders, seeds and rates of its folder; what was not given adds nothing to these.

    Raises:
        ConfigError: the folder holds another comparison, or something else.
        DataError: the folder's description is damaged.
    """
    if not os.path.exists(folder / INDEX):  # unlike Path.exists, False for a name that is too long
        if os.path.isdir(folder) and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ConfigError(
                f"--out {str(folder)!r} has other files in it but no comparison; give a new or empty folder"
            )
        return config.model_copy(update={"contenders": config.contenders or default_contenders()})
    there, given = validate(ComparisonConfig, _read(folder)["config"]), config.model_fields_set
    before, now = flat_config(there), flat_config(config)
    _refuse({key: (before[key], now[key]) for key in before if key not in _MAY_GROW}, folder)
    for label in there.contenders.keys() & config.contenders.keys():
        if not _is_same_contender(there.contenders[label], config.contenders[label]):
            raise ConfigError(
                f"--out {str(folder)!r} has results of another {label}: it or its file has changed since. Give it "
                "another name, or use another folder"
            )
    rated = "lr" in given or "lr" in config.optimizer.model_fields_set
    changes = {
        "contenders": {**there.contenders, **config.contenders},
        "seeds": max(there.seeds, config.seeds if "seeds" in given else 0),
        "lr": list(dict.fromkeys([*there.rates, *(config.rates if rated else ())])),
        "tune": config.tune if "tune" in given else there.tune,
    }
    return config.model_copy(update=changes)


def check_data(folder: Path, data: str) -> None:
    """Refuse other data than those of the folder.

    Raises:
        ConfigError: which they are.
    """
    if os.path.exists(folder / INDEX):
        _refuse({"data found": (_read(folder)["data"], data)}, folder)


def describe(folder: Path, config: ComparisonConfig, data: str) -> None:
    """Make the folder of a comparison, and write its description; `data` tells one set of data from another.

    Raises:
        ConfigError: it cannot be written.
    """
    index = {
        "schema": SCHEMA,
        "data": data,
        "config": config.model_copy(update={"lr": list(config.rates)}).model_dump(),
    }
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        write_whole(folder / INDEX, json.dumps(index, indent=1))
    except OSError as error:
        why = "it is a file; give a folder" if os.path.isfile(folder) else error.strerror or error
        raise ConfigError(f"cannot write to --out {str(folder)!r}: {why}") from None


def _refuse(values: dict[str, tuple[Any, Any]], folder: Path) -> None:
    """Refuse values of which the first, those of the folder, are not the second."""
    said = [
        f"{key} is {_shown(there)} there and {_shown(now)} now" for key, (there, now) in values.items() if there != now
    ]
    if said:
        raise ConfigError(
            f"--out {str(folder)!r} holds another comparison: {'; '.join(said)}. Use the same settings (methods, seeds "
            "and rates may be added), or another folder"
        )


def _shown(value: Any) -> str:
    return "not set" if value is None else on_one_line(value)


def _is_same_contender(there: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether two contenders change the same keys; of files the text counts, not the name."""
    text, other = there.get("schedule"), now.get("schedule")
    if text is not None and other is not None and is_same(text, other):
        now = {**now, "schedule": text}
    return bool(there == json.loads(json.dumps(now)))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{str(path)!r} is damaged ({error}); remove it") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise DataError(f"{str(path)!r} has schema {schema}, this version of penstock reads {SCHEMA}")
    return found
