"""The folder of a run: its configuration, a history of changes to it, and how far the run is.

config.yaml      the configuration, which a person may change before a run is resumed
.config.yaml     the same as it was written, with its SHA-256 in the first line, to tell what was changed or lost
metrics.jsonl    what `penstock.train.metrics_file` writes
checkpoints/     what `penstock.checkpoint.format` writes
restarted-1/     metrics and checkpoints from before the run was begun again
"""

from __future__ import annotations

import datetime
import os
import re
from functools import partial
from itertools import count
from pathlib import Path

from penstock.checkpoint.folder_claim import LOCK
from penstock.checkpoint.format import FOLDER, Checkpoint, checkpoints, open_newest
from penstock.errors import CheckpointError, ConfigError, UnsavedRunError
from penstock.guarded_files import check_own_folder, check_regular, open_regular
from penstock.train.config.schema import TrainConfig
from penstock.train.config.written_config import CONFIG, WRITTEN, write_config
from penstock.train.setup.model_shape import check_same_shape
from penstock.train.setup.recorded_progress import METRICS, recorded

_MOMENT = "%Y-%m-%d-%H%M%S"
_RUN = re.compile(r"\d{4}-\d\d-\d\d-\d{6}-")  # names of run folders begin with the moment

_FILES = (CONFIG, WRITTEN, METRICS, "trace.json", "lags.json")
_FOLDERS = (FOLDER, "weights", "averaged", "averaged/weights")


def newest_checkpoint(folder: Path, share: tuple[int, int] | None = None) -> Checkpoint | None:
    """Return a run's newest intact checkpoint; None if there is none. Its files are verified if there is a `share`."""
    try:
        newest, _ = open_newest(folder, opened=partial(Checkpoint, share=share))
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
        for name in (*_FILES, LOCK):
            if os.path.lexists(folder / name):
                check_regular(folder / name)
        if os.path.lexists(folder / LOCK):
            open_regular(folder / LOCK, os.O_RDWR, "r+b").close()
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


def how_to_go_on(folder: Path, said: str = "", as_before: str | None = None) -> str:
    """Return the hint for a run that has ended early: how to resume it.

    Args:
        folder: of the run.
        said: what has ended it.
        as_before: the hint if it has ended because of a change that has been taken back.
    """
    newest = newest_checkpoint(folder, (0, 1) if CheckpointError.__name__ in said else None)
    damaged = newest is None and bool(checkpoints(folder))
    if as_before is not None and not damaged:
        return as_before
    if newest is None:
        none = "is no intact checkpoint" if damaged else "is no checkpoint"
        yet, aside = ("", ", which sets the damaged ones aside") if damaged else (" yet", "")
        return (
            f"there {none} in {folder} to resume from{yet}; to begin again there{aside}:\n"
            f"  penstock train --resume {folder} --restart"
        )
    batch, more = newest.batch, recorded(folder).batches
    further = "" if more <= batch else f" (it was {more} batches far, so {more - batch} are trained again)"
    return f"to resume from the checkpoint after {batch} batches{further}:\n  penstock train --resume {folder}"


def make_run_folder(config: TrainConfig) -> Path:
    """Make a new folder for a run, with the configuration in it.

    Raises:
        ConfigError: it cannot be made.
    """
    now = datetime.datetime.now().strftime(_MOMENT)
    name = re.sub(r"[^\w.-]+", "-", config.row.name)
    base = Path(config.out) / f"{now}-{name}-{_shape(config)}"
    folder, number = base, 1
    try:
        while True:
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
                folder = base.with_name(f"{base.name}-{number}")
        write_config(config, folder)
    except OSError as error:
        raise ConfigError(f"cannot make a run folder in {config.out!r}: {error.strerror or error}") from None
    return folder


def check_resume(config: TrainConfig, run: Path) -> None:
    """Refuse to go on with a run that has lost its checkpoints, is further than asked for, or has another model.

    Its own end can be made again.

    Raises:
        ConfigError: how far it is, or what was changed of its model.
    """
    check_whole_run(run)
    newest = newest_checkpoint(run)
    if newest is None:
        return
    if newest.batch > config.batches:
        raise ConfigError(
            f"the run in {str(run)!r} has {newest.batch} batches already; set batches above that, got {config.batches}"
        )
    check_same_shape(config, run, newest)


def is_of_a_run(out: Path, file: Path) -> bool:
    """Return whether a file lies in a run folder in `out`; trained on its own records, a run would change its text."""
    try:
        within = file.resolve().relative_to(out.resolve())
    except ValueError:
        return False
    return _RUN.match(within.parts[0]) is not None


def _shape(config: TrainConfig) -> str:
    """Write stages and microbatches, and how many pipelines and tensor ranks if there are several."""
    numbers = [*([config.width] if config.width > 1 else []), config.stages, config.microbatches]
    return "x".join(map(str, numbers)) + (f"-tp{config.tensor_parallel}" if config.tensor_parallel > 1 else "")
