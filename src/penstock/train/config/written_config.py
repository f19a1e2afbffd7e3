"""The configuration in the folder of a run: written there, and compared with what a person has changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError
from penstock.guarded_files import read_text, write_whole
from penstock.train.config.load import load_config, validate_config
from penstock.train.config.schema import TrainConfig
from penstock.train.config.values import Strict
from penstock.yaml_file import LARGEST, parse_yaml, read_yaml

CONFIG = "config.yaml"
WRITTEN = ".config.yaml"
_DIGEST = "# As penstock has written it; SHA-256 of what follows: "
_UNKNOWN = "unknown"
Changes = dict[str, dict[str, Any]]
"""key -> {"before": value, "now": value}."""


def write_config(config: TrainConfig, folder: Path, history: Sequence[str] = ()) -> None:
    """Write the configuration of a run into its folder.

    Args:
        config: of the run.
        folder: of the run.
        history: comments to begin with.

    Raises:
        OSError: it cannot be written.
    """
    text = as_yaml(config)
    write_whole(folder / WRITTEN, f"{_DIGEST}{_digest(text)}\n{text}")
    write_whole(folder / CONFIG, "\n".join([*history, text]))


def changed_by_hand(folder: Path) -> Changes:
    """Return what a person has changed in the configuration of a run since it was written.

    Raises:
        ConfigError: a part of the configuration is missing, or what it is compared with is damaged.
    """
    written, path = _as_written(folder), folder / CONFIG
    if written is None:
        return {}
    values = read_yaml(path)
    if missing := [key for key in written if not _has(values, key)]:
        raise ConfigError(
            f"{str(path)!r} is not whole: of the {len(written)} keys that were written there, {len(missing)} are "
            f"missing, the first of them {missing[0]}. Put the file back, or take it as it was written: --config "
            f"{folder / WRITTEN}"
        )
    return _differing(written, flat_config(load_config(path, [], resumes=True)))


def _as_written(folder: Path) -> dict[str, Any] | None:
    """Return the configuration that Penstock has written into a run folder last, flat; None if it has not.

    Keys that the version which wrote it did not know are not there.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / WRITTEN
    try:
        text = read_text(path, LARGEST)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    first, _, rest = text.partition("\n")
    if first != f"{_DIGEST}{_digest(rest)}":
        raise ConfigError(
            f"{str(path)!r} is damaged, so nobody knows what was changed in {CONFIG}; look that file through and "
            f"remove the damaged one, or give the configuration with --config"
        )
    values = parse_yaml(rest, str(path))
    return {key: value for key, value in flat_config(validate_config(values)).items() if _has(values, key)}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _has(values: Mapping[str, Any], key: str) -> bool:
    """Return whether a key of the form `section.key` is in nested values."""
    section, _, last = key.rpartition(".")
    inner = values.get(section) if section else values
    return isinstance(inner, Mapping) and last in inner


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    return {key: {"before": before[key], "now": now[key]} for key in before if before[key] != now[key]}


def changes_in_words(changes: Changes) -> str:
    """Return changes in one line."""
    return ", ".join(f"{option_of(key, c['now'])} (before: {on_one_line(c['before'])})" for key, c in changes.items())


def changed_since(folder: Path, now: TrainConfig) -> Changes:
    """Return in what a configuration differs from the one that was written into a run folder last."""
    try:
        before = _as_written(folder)
    except ConfigError:  # damaged
        before = None
    return {} if before is None else _differing(before, flat_config(now))


def option_of(key: str, value: Any) -> str:
    """Return a key with its value, as `--set` reads it."""
    return f"{key}={on_one_line(value)}"


def note_changes(config: TrainConfig, folder: Path, batch: int) -> Changes:
    """Write the configuration that a run is resumed with into its folder, if it has changed.

    Comments at the top of `config.yaml` record every such change: from which batch on, and the value before. A key that
    an earlier version of Penstock did not know counts as changed, as it may do something else now than it did then.

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
        there, history = load_config(path, [], resumes=True), _comments(path)
        before = _as_written(folder) or flat_config(there)
    except (ConfigError, OSError, ValueError):  # there is none, or a later version wrote it
        before, history = {}, []
    now = flat_config(config)
    if before == now:
        return {}
    changes = _differing({**dict.fromkeys(now, _UNKNOWN), **before} if before else {}, now)
    if changes and batch:
        history.append(f"# From batch {batch} on: {changes_in_words(changes)}")
    try:
        write_config(config, folder, history)
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
    lines = read_text(path, LARGEST).splitlines()
    return [*takewhile(lambda line: line.startswith("#") and not line.startswith(_DIGEST), lines)]


def flat_config(config: TrainConfig) -> dict[str, Any]:
    """Flatten sections to keys of the form `section.key`; values that are dictionaries remain."""
    flat: dict[str, Any] = {}
    for key, value in config:
        flat |= {f"{key}.{name}": v for name, v in value} if isinstance(value, Strict) else {key: value}
    return flat


def on_one_line(value: Any) -> str:
    """Format a value on one line, as `--set` reads it; of a schedule only its first line, which names its file."""
    if isinstance(value, str) and value.startswith("# "):
        return value.splitlines()[0].removeprefix("# ")
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)
