"""One run of a comparison: trained by the loop of `penstock train` in a folder of its own, and read from there."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from penstock.compare.config import ComparisonConfig
from penstock.errors import ConfigError, DataError
from penstock.runtime.update.run_events import Evaluated
from penstock.timeline import Timeline
from penstock.train.config.schema import TrainConfig
from penstock.train.loop import train_here
from penstock.train.metrics_file import Metrics
from penstock.train.observer import Observer, Progress, RunSummary
from penstock.train.prepare.prepare_run import Task, prepare
from penstock.train.setup.recorded_progress import records
from penstock.train.setup.run_folder import saved_batches

Told = Callable[[int, float], None]
"""Called after each batch with the number of batches done and the loss of the last one."""
_WINDOW = 25  # batches whose mean loss says whether a run has diverged, if there are no evaluations


class Key(NamedTuple):
    """Identifies one run of a comparison."""

    method: str  # the contender's label
    seed: int
    lr: float

    @property
    def folder(self) -> str:
        """The name of the run folder."""
        name = quote(self.method, safe=":=,.-").replace(":", "+")  # no two labels have the same one
        return f"{name}-seed-{self.seed}-lr-{self.lr!r}"

    def __str__(self) -> str:
        return f"{self.method}, seed {self.seed}, lr {self.lr:g}"


class Score(NamedTuple):
    """The loss on held-out samples after so many updates."""

    updates: int
    loss: float


@dataclass(frozen=True)
class TrialResult:
    """The result of a run."""

    key: Key
    scores: tuple[Score, ...]
    losses: tuple[float, ...]  # of every batch, at the weights that its forwards read
    norms: tuple[float, ...]  # of every gradient before clipping; NaN where nothing is clipped
    diverged: int | None  # the number of batches after which divergence was noticed
    seconds: float  # that it trained, since it was started or resumed last


def read_result(runs: Path, key: Key) -> TrialResult | None:
    """Read the result of a run from the metrics in its folder; None if it has not ended.

    Raises:
        DataError: the metrics say that it has ended, but not all before that.
    """
    losses, norms, evaluated = dict[int, Any](), dict[int, Any](), dict[int, Any]()
    end: dict[str, Any] = {}
    for line, _ in records(runs / key.folder):
        if "batch" in line:
            losses[line["batch"]] = line["loss"]
        elif "update" in line:
            norms[line["update"]] = line["norm"]
        elif "evaluated" in line:
            evaluated[line["evaluated"]] = line["loss"]
        elif "validation_loss" in line or "diverged" in line:
            end = end | line
    if not end:
        return None
    count = end.get("diverged", len(losses))
    if "diverged" not in end:
        evaluated[count] = end["validation_loss"]
    if any(batch not in losses for batch in range(count)):
        raise DataError(f"{str(runs / key.folder)!r} lacks some of its losses; remove it to train that run again")
    return TrialResult(
        key,
        tuple(Score(updates, _number(evaluated[updates])) for updates in sorted(evaluated)),
        tuple(_number(losses[batch]) for batch in range(count)),
        tuple(_number(norms.get(batch)) for batch in range(count)),
        end.get("diverged"),
        end["seconds"],
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def train_contender(config: ComparisonConfig, task: Task, runs: Path, key: Key, tell: Told) -> TrialResult:
    """Train one run to its end, or until it diverges; an earlier start of it goes on if it has left a checkpoint.

    Raises:
        ConfigError: its folder cannot be written.
        PenstockError: see `train_here`. A loss that is not finite or grows is a result, not an error.
        DataError: the metrics of the run could not be written.
    """
    folder, run = runs / key.folder, config.run(*key)
    try:
        if folder.exists() and saved_batches(folder) is None:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {str(folder)!r}: {error.strerror or error}") from None
    begun = [_number(line["loss"]) for line, _ in records(folder) if line.get("batch") == 0]
    watch = _Watch(run, config.spike, begun, tell)
    try:
        train_here(prepare(run, task=task), folder, watch)
    except _DivergedError as diverged:
        Metrics(folder).add(diverged=diverged.batches, seconds=watch.seconds)
    result = read_result(runs, key)
    if result is None:
        raise DataError(f"the run in {str(folder)!r} has ended, but its metrics do not say so; is the disk full?")
    return result


class _DivergedError(Exception):
    """A run has diverged after so many batches, which ends it."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.batches = batches


class _Watch(Observer):
    """Ends a run that diverges: its loss is too far above that of its first batch, or an update was skipped.

    Args:
        config: of the run.
        spike: how many times the first loss is too much.
        first: the loss of the first batch, if an earlier start of the run has trained it.
        tell: called after each batch.
    """

    def __init__(self, config: TrainConfig, spike: float, first: Sequence[float], tell: Told) -> None:
        self._window, self._spike, self._tell = config.evaluate.every or _WINDOW, spike, tell
        self._first, self._losses = [*first[:1]], list[float]()
        self.seconds = 0.0

    def progress(self, progress: Progress) -> None:
        """A batch is done."""
        loss, self.seconds = _number(progress.loss), progress.seconds
        self._first = self._first or [loss]
        self._losses = [*self._losses, loss][-self._window :]
        self._tell(progress.batch, loss)
        mean = sum(self._losses) / len(self._losses)
        if not math.isfinite(loss) or (len(self._losses) == self._window and self._is_too_much(mean)):
            raise _DivergedError(progress.batch)
        if progress.skipped:
            raise _DivergedError(progress.skipped[0] + 1)

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation during training is done."""
        if self._is_too_much(_number(found.loss)):
            raise _DivergedError(found.version)

    def finished(self, summary: RunSummary, timeline: Timeline, sample: str | None) -> None:
        """The run has ended."""
        del timeline, sample
        if self._is_too_much(_number(summary.validation_loss)):
            raise _DivergedError(summary.batches)

    def _is_too_much(self, loss: float) -> bool:
        return not loss <= self._spike * self._first[0]
