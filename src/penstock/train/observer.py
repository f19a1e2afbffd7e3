"""Interface through which the reporting rank of a run notifies the display, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.idle_time import TimeSplit
from penstock.runtime.plan.adapted_in_flight import AdaptedInFlight
from penstock.runtime.update.run_events import Evaluated
from penstock.timeline import Timeline
from penstock.train.prepare.prepare_run import Prepared


class Switched(NamedTuple):
    """The event that another method has taken over.

    Attributes:
        batch: the first batch that it trains.
        method: its name.
        why: the reason, for display.
        came: the number of batches trained before the run went back to a checkpoint; None if it did not.
    """

    batch: int
    method: str
    why: str
    came: int | None = None


@dataclass(frozen=True)
class Progress:
    """The progress of training, as the reporting rank knows it.

    Attributes:
        bubble: idle share of all ranks since the last report that had figures; None before the first.
        live_bytes: per rank, bytes by kind; empty until all ranks have told theirs, at the first batch or two.
        trained: batches since the run was started, or restarted.
        skipped: batches whose updates were skipped, of those that were decided since the last report.
    """

    batch: int
    batches: int
    loss: float | None
    seconds: float
    tokens: int
    tokens_per_second: float
    rate: float
    bubble: float | None
    live_bytes: dict[int, dict[str, int]]
    trained: int
    skipped: Sequence[int] = ()


@dataclass(frozen=True)
class RunSummary:
    """The results at the end of a run.

    Attributes:
        tokens: of all batches of the run.
        tokens_now: of those that were trained since the run was started or resumed last, in `seconds`.
        entropy: unigram entropy of the held-out text, in nats per token, which a model without context would reach.
        peak_bytes: per rank, the most bytes of each kind.
        time: how the time of training was spent.
        averaged_loss: the validation loss with averaged weights, if there are any.
        again: the number of updates undone and redone; None if the method never does that.
        troubles: what has gone wrong, to be told in the last lines.
    """

    folder: Path
    batches: int
    tokens: int
    tokens_now: int
    seconds: float
    loss: float | None
    validation_loss: float | None
    entropy: float
    bubble: float
    peak_bytes: dict[int, dict[str, int]]
    time: TimeSplit
    averaged_loss: float | None = None
    again: int | None = None
    troubles: Sequence[str] = ()


class Observer:
    """Receives the events of a run on the reporting rank; this one does nothing with them."""

    def started(self, prepared: Prepared, parts: list[list[str]], batch: int) -> None:
        """Training begins with `batch`, which is not 0 if the run was resumed from a checkpoint."""

    def progress(self, progress: Progress) -> None:
        """A batch is done."""

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation during training is done."""

    def switched(self, switched: Switched) -> None:
        """Another method takes over."""

    def adapted(self, found: AdaptedInFlight) -> None:
        """The run goes on with other microbatches in flight, as its links ask for."""

    def warned(self, trouble: str) -> None:
        """Something has gone wrong that does not end the run, such as a checkpoint that was not written."""

    def ending(self) -> None:
        """The run was requested to end, and will end after the batches in flight."""

    def interrupted(self, folder: Path, batches: int, timeline: Timeline, troubles: Sequence[str]) -> None:
        """The run has ended early, after saving a checkpoint of so many batches; all troubles are told again."""

    def sampling(self) -> None:
        """Training has finished and the weights are saved; a text is being sampled, which may take some seconds."""

    def finished(self, summary: RunSummary, timeline: Timeline, sample: str | None) -> None:
        """Everything is done; `sample` is a text from the trained model, if it is one of bytes."""
