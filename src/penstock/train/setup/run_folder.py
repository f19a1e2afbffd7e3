"""The folder of a resumed run: how far the run is, and a history of changes to its configuration."""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from penstock.checkpoint.format import Checkpoint, open_newest
from penstock.errors import CheckpointError, ConfigError
from penstock.train.config.load import load_config
from penstock.train.config.schema import Strict, TrainConfig

CONFIG = "config.yaml"


def saved_batches(folder: Path) -> int | None:
    """Return the number of batches of a run's newest intact checkpoint; None if there is none."""
    try:
        newest, _ = open_newest(folder, opened=partial(Checkpoint, share=None))
    except CheckpointError:  # reported when the checkpoint is loaded
        return None
    return None if newest is None else newest.batch


def check_is_run(folder: Path) -> None:
    """Refuse to resume what is no run folder.

    Raises:
        ConfigError: there is nothing of this name, or it is something else; names the newest run in it if there is one.
    """
    if not folder.exists():
        raise ConfigError(
            f"there is no folder {str(folder)!r} to resume a run from; a run names its folder when it ends"
        )
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; give the folder of the run that is to be resumed")
    if not (folder / CONFIG).exists():
        runs = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        newest = f"; the newest run in it is {str(runs[-1])!r}" if runs else ""
        raise ConfigError(f"{str(folder)!r} is not the folder of a run of penstock train: it has no {CONFIG}{newest}")


def how_to_go_on(folder: Path) -> str:
    """Return the hint for a run that has ended early: how to resume it."""
    batch = saved_batches(folder)
    if batch is None:
        return f"there is no checkpoint in {folder} to resume from yet"
    return f"to resume from the checkpoint after {batch} batches:\n  penstock train --resume {folder}"


def note_changes(config: TrainConfig, folder: Path, batch: int) -> dict[str, dict[str, Any]]:
    """Write the configuration that a run is resumed with into its folder, if it has changed.

    Comments at the top of `config.yaml` record every such change: from which batch on, and the value before.

    Args:
        config: that the run is resumed with.
        folder: of the run.
        batch: the first batch trained with it.

    Returns:
        key -> {"before": value, "now": value} of all that has changed.

    Raises:
        ConfigError: it cannot be written.
    """
    path = folder / CONFIG
    try:
        before, history = _flat(load_config(path, [])), _comments(path)
    except ConfigError:  # there is none, or another version wrote it
        before, history = {}, []
    now = _flat(config)
    changes = {key: {"before": before[key], "now": now[key]} for key in before if before[key] != now[key]}
    if before == now:
        return {}
    if changes and batch:
        said = (f"{key}={_written(c['now'])} (before: {_written(c['before'])})" for key, c in changes.items())
        history.append(f"# From batch {batch} on: {', '.join(said)}")
    text = "\n".join([*history, as_yaml(config)])
    try:
        temporary = path.with_name(f".{CONFIG}.{os.getpid()}.part")
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}, which records the configuration of the run: {error.strerror or error}"
        ) from None
    return changes


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as schedules, line by line."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if text.startswith("# ") else None)


_Dumper.add_representer(str, _text)


def as_yaml(config: TrainConfig) -> str:
    """Return a configuration as YAML that `load_config` reads back."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False)


def _comments(path: Path) -> list[str]:
    """Return the comments at the beginning of a file."""
    return list(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))


def _flat(config: TrainConfig) -> dict[str, Any]:
    """Flatten sections to keys of the form `section.key`; values that are dictionaries remain."""
    flat: dict[str, Any] = {}
    for key, value in config:
        flat |= {f"{key}.{name}": v for name, v in value} if isinstance(value, Strict) else {key: value}
    return flat


def _written(value: Any) -> str:
    """Format a value on one line, as `--set` reads it; of a schedule only its first line, which names its file."""
    if isinstance(value, str) and value.startswith("# "):
        return value.splitlines()[0].removeprefix("# ")
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)
