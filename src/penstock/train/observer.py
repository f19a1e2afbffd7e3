"""What the reporting rank of a run tells, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.idle_time import TimeSplit
from penstock.runtime.update.events import Evaluated
from penstock.timeline import Timeline
from penstock.train.setup.prepare import Prepared


class Switched(NamedTuple):
    """Another method has taken over.

    Attributes:
        batch: the first one that it trains.
        method: its name.
        why: for people.
        came: how far the run had come, where it has gone back to a checkpoint.
    """

    batch: int
    method: str
    why: str
    came: int | None = None


@dataclass(frozen=True)
class Progress:
    """How far training is, as the reporting rank knows it.

    Attributes:
        bubble: idle share of all ranks since the last report that had figures; None before the first.
        live_bytes: per rank, bytes by kind.
        trained: batches since the run was started, or started again.
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


@dataclass(frozen=True)
class RunSummary:
    """The end of a run.

    Attributes:
        entropy: unigram entropy of the held-out text, in nats per token: what no context at all would reach.
        peak_bytes: per rank, the most bytes of each kind.
        time: where it went in training.
        averaged_loss: the validation loss with averaged weights, where there are any.
        again: updates that were taken back and made again; None where the method never does that.
    """

    folder: Path
    batches: int
    tokens: int
    seconds: float
    loss: float | None
    validation_loss: float | None
    entropy: float
    bubble: float
    peak_bytes: dict[int, dict[str, int]]
    time: TimeSplit
    averaged_loss: float | None = None
    again: int | None = None


class Observer(Protocol):
    """What the reporting rank tells about the run."""

    def started(self, prepared: Prepared, parts: list[list[str]], batch: int) -> None:
        """The pipeline stands; training begins with `batch`, which is not 0 where it goes on from a checkpoint."""
        ...

    def progress(self, progress: Progress) -> None:
        """Another batch is done."""
        ...

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation in the midst of training is done."""
        ...

    def switched(self, switched: Switched) -> None:
        """Another method takes over."""
        ...

    def ending(self) -> None:
        """The run has been told to end, and will after the batches under way."""
        ...

    def interrupted(self, folder: Path, batches: int, timeline: Timeline) -> None:
        """The run has been told to end, and has saved a checkpoint after so many batches."""
        ...

    def finished(self, summary: RunSummary, timeline: Timeline) -> None:
        """Training is over and the weights are saved."""
        ...

    def sampled(self, summary: RunSummary, text: str) -> None:
        """What the model writes (models of bytes only)."""
        ...
