"""The folder of a run: its configuration, a history of changes to it, and how far the run is.

config.yaml      the configuration, which a person may change before a run is resumed
.config.yaml     the same as it was written, with its SHA-256 in the first line, to tell what was changed or lost
metrics.jsonl    what `penstock.train.metrics_file` writes
checkpoints/     what `penstock.checkpoint.format` writes
restarted-1/     metrics and checkpoints from before the run was begun again
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import yaml

from penstock.checkpoint.format import FOLDER, Checkpoint, checkpoints, open_newest
from penstock.errors import CheckpointError, ConfigError, UnsavedRunError
from penstock.files import check_own_folder, check_regular, read_text, write_whole
from penstock.train.config.load import load_config, validate_config
from penstock.train.config.schema import TrainConfig
from penstock.train.config.values import Strict
from penstock.train.setup.recorded_progress import METRICS, recorded
from penstock.yaml_file import LARGEST, parse_yaml, read_yaml

CONFIG = "config.yaml"
WRITTEN = ".config.yaml"
_FILES = (CONFIG, WRITTEN, METRICS, "trace.json", "lags.json")
_FOLDERS = (FOLDER, "weights", "averaged", "averaged/weights")
_DIGEST = "# As penstock has written it; SHA-256 of what follows: "
Changes = dict[str, dict[str, Any]]
"""key -> {"before": value, "now": value}."""


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return a run's newest intact checkpoint, whose files are not verified; None if there is none."""
    try:
        newest, _ = open_newest(folder, opened=partial(Checkpoint, share=None))
    except CheckpointError:  # reported when the checkpoint is loaded
        return None
    return newest


def saved_batches(folder: Path) -> int | None:
    """Return the number of batches of a run's newest intact checkpoint; None if there is none."""
    newest = newest_checkpoint(folder)
    return None if newest is None else newest.batch


def check_is_run(folder: Path) -> None:
    """Refuse to resume what is no run folder.

    Raises:
        ConfigError: there is nothing of this name, or it is something else; names the newest run in it if there is one.
    """
    if not os.path.exists(folder):  # unlike Path.exists, False for a name that is too long
        raise ConfigError(
            f"there is no folder {str(folder)!r} to resume a run from; a run names its folder when it ends"
        )
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; give the folder of the run that is to be resumed")
    if not (folder / CONFIG).exists():
        runs = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        newest = f"; the newest run in it is {str(runs[-1])!r}" if runs else ""
        raise ConfigError(f"{str(folder)!r} is not the folder of a run of penstock train: it has no {CONFIG}{newest}")


def check_own_files(folder: Path) -> None:
    """Refuse a run folder in which links or pipes stand for what a run reads and writes.

    Raises:
        ConfigError: which one.
    """
    try:
        for name in _FOLDERS:
            check_own_folder(folder / name)
        for name in _FILES:
            if os.path.lexists(folder / name):
                check_regular(folder / name)
    except OSError as error:
        raise ConfigError(f"cannot resume in {str(folder)!r}: {error.filename}: {error.strerror}") from None


def check_whole_run(folder: Path) -> None:
    """Refuse to resume a run that has lost its checkpoints: it would begin at its first batch.

    Raises:
        ConfigError: how far the run is.
    """
    known = recorded(folder)
    if not known.batches or checkpoints(folder):
        return
    had = f"its last checkpoint was of {known.saved} batches" if known.saved else "it has never had a checkpoint"
    raise ConfigError(
        f"the run in {str(folder)!r} has trained {known.batches} batches, but there is no checkpoint in "
        f"{str(folder / FOLDER)!r} to resume from ({had}); put the checkpoints back, or begin again with --restart, "
        "which sets the records of the run aside"
    )


def check_is_saved(folder: Path, start: int) -> None:
    """Make sure that a run which has ended has written a checkpoint, if it has tried.

    Args:
        folder: of the run.
        start: the size of its metrics when it was started.

    Raises:
        UnsavedRunError: it has written none.
    """
    known = recorded(folder, start)
    if checkpoints(folder) and (known.saved or not known.failures):
        return
    why = f" ({known.failure})" if known.failure else ""
    older = saved_batches(folder)
    kept = "it cannot be continued" if older is None else f"it can be continued from {older} batches only"
    raise UnsavedRunError(
        f"the run in {str(folder)!r} has ended, but none of its checkpoints could be written{why}: {kept}"
    )


def set_aside_run(folder: Path) -> None:
    """Set metrics and checkpoints of a run aside, so that it begins again.

    Raises:
        ConfigError: the folder is not writable.
    """
    place = next(path for number in count(1) if not (path := folder / f"restarted-{number}").exists())
    try:
        for name in (METRICS, FOLDER):
            if os.path.lexists(folder / name):
                place.mkdir(exist_ok=True)
                os.rename(folder / name, place / name)
    except OSError as error:
        raise ConfigError(
            f"cannot set the records of the run in {str(folder)!r} aside: {error.strerror or error}"
        ) from None


def how_to_go_on(folder: Path) -> str:
    """Return the hint for a run that has ended early: how to resume it."""
    batch, more = saved_batches(folder), recorded(folder).batches
    if batch is None:
        return (
            f"there is no checkpoint in {folder} to resume from yet; to begin again there:\n"
            f"  penstock train --resume {folder} --restart"
        )
    further = "" if more <= batch else f" (it was {more} batches far, so {more - batch} are trained again)"
    return f"to resume from the checkpoint after {batch} batches{further}:\n  penstock train --resume {folder}"


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
    before, values = _flat(written), read_yaml(path)
    there = {key for key in before if _has(values, key)}
    if missing := [key for key in before if key not in there]:
        raise ConfigError(
            f"{str(path)!r} is not whole: of the {len(before)} keys that were written there, {len(missing)} are "
            f"missing, the first of them {missing[0]}. Put the file back, or take it as it was written: --config "
            f"{folder / WRITTEN}"
        )
    return _differing(before, _flat(load_config(path, [])))


def _as_written(folder: Path) -> TrainConfig | None:
    """Return the configuration that Penstock has written into a run folder last; None if it has not.

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
    return validate_config(parse_yaml(rest, str(path)))


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
    return ", ".join(f"{option_of(key, c['now'])} (before: {_written(c['before'])})" for key, c in changes.items())


def changed_since(folder: Path, now: TrainConfig) -> Changes:
    """Return in what a configuration differs from the one that was written into a run folder last."""
    try:
        before = _as_written(folder)
    except ConfigError:  # damaged
        before = None
    return {} if before is None else _differing(_flat(before), _flat(now))


def option_of(key: str, value: Any) -> str:
    """Return a key with its value, as `--set` reads it."""
    return f"{key}={_written(value)}"


def note_changes(config: TrainConfig, folder: Path, batch: int) -> Changes:
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
        there, history = load_config(path, []), _comments(path)
        before = _flat(_as_written(folder) or there)
    except (ConfigError, OSError, ValueError):  # there is none, or another version wrote it
        before, history = {}, []
    now = _flat(config)
    changes = _differing(before, now)
    if before == now:
        return {}
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
