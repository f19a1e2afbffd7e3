"""A run that goes on: how far it is, and with what, so that its folder says what trained which batches."""

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
    """How many batches the newest whole checkpoint of a run has; None where there is none."""
    try:
        newest, _ = open_newest(folder, opened=partial(Checkpoint, share=None))
    except CheckpointError:  # told by those who load it
        return None
    return None if newest is None else newest.batch


def how_to_go_on(folder: Path) -> str:
    """What is to be said under the message of a run that has ended before its time."""
    batch = saved_batches(folder)
    if batch is None:
        return f"there is no checkpoint in {folder} to go on from yet"
    return f"to go on from the checkpoint after {batch} batches:\n  penstock train --resume {folder}"


def note_changes(config: TrainConfig, folder: Path, batch: int) -> dict[str, dict[str, Any]]:
    """Write the configuration that a run goes on with into its folder, where it is another one than before.

    Above its keys `config.yaml` has a comment for every such change: from which batch on, and what was before.

    Args:
        config: with which it goes on.
        folder: of the run.
        batch: the first one that is trained so.

    Returns:
        key -> {"before": value, "now": value} of all that has changed.

    Raises:
        ConfigError: it cannot be written.
    """
    path = folder / CONFIG
    try:
        before, history = _flat(load_config(path, [])), _comments(path)
    except ConfigError:  # there is none, or it is of another version
        before, history = {}, []
    now = _flat(config)
    changes = {key: {"before": before[key], "now": now[key]} for key in before if before[key] != now[key]}
    if before == now:
        return {}
    if changes and batch:
        said = (f"{key}={_written(c['now'])} (before: {_written(c['before'])})" for key, c in changes.items())
        history.append(f"# From batch {batch} on: {', '.join(said)}")
    text = "\n".join([*history, yaml.safe_dump(config.model_dump(), sort_keys=False)])
    try:
        temporary = path.with_name(f".{CONFIG}.{os.getpid()}.part")
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}, which is to say with what the run goes on: {error.strerror or error}"
        ) from None
    return changes


def _comments(path: Path) -> list[str]:
    """Those at the beginning of a file."""
    return list(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))


def _flat(config: TrainConfig) -> dict[str, Any]:
    """Keys of sections as `section.key`, but for values that are dictionaries themselves."""
    flat: dict[str, Any] = {}
    for key, value in config:
        flat |= {f"{key}.{name}": v for name, v in value} if isinstance(value, Strict) else {key: value}
    return flat


def _written(value: Any) -> str:
    """As `--set` takes it, on one line."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)
