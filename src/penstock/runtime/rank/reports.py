"""What a rank knows of the losses of batches, from its microbatches to its reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.comm.core.recorder import Recorder
from penstock.runtime.update.decisions import Decisions, Evaluated
from penstock.schedule.proof.in_flight import Piece
from penstock.stage.graphs import Loss
from penstock.timeline import Interval, Waiting
from penstock.weights.decision import Decision


@dataclass(frozen=True)
class Report:
    """What became of one batch.

    Attributes:
        batch: its number since the start of training.
        loss: the weighted mean over the rank's part of the batch (all of it in one pipeline with one last stage); None
            on ranks without a last stage, and where the weight is zero.
        weight: the sum of the loss weights; None on ranks without a last stage.
        seconds: when it was known, since the pipeline was made.
        decided: the updates that were made or skipped on this rank since the last report; they lag behind the losses.
        evaluated: the evaluations that have become known since, on ranks that know (all, where stages decide together,
            else that of the last stage).
    """

    batch: int
    loss: float | None
    weight: float | None
    seconds: float
    decided: tuple[Decision, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()


class Reporting:
    """Of one rank, for one span. Batches are counted from the start of training.

    Args:
        forwards: of a batch on this rank.
        steps: stages of this rank that are updated.
        decides: stages decide together.
        waits: updates wait for their decision.
        decisions: this rank's part in them.
        recorder: takes down when reports are handed out.
    """

    def __init__(
        self, forwards: int, steps: int, decides: bool, waits: bool, decisions: Decisions, recorder: Recorder
    ) -> None:
        self._wanted, self._steps, self._decides, self._waits = forwards, steps, decides, waits
        self._decisions, self._recorder = decisions, recorder
        self._forwards: dict[int, int] = {}  # done, of each batch
        self._losses: dict[int, dict[Piece, Loss]] = {}
        self._weights: dict[int, tuple[float, int]] = {}  # N of each batch, once known here, and the updates before it
        self._sums: dict[int, Loss] = {}  # of each batch that stages have not decided on
        self._report: Report | None = None

    def add(self, batch: int, key: Piece, loss: Loss) -> None:
        """The loss of a microbatch (or slice); the last one counts."""
        self._losses.setdefault(batch, {})[key] = loss

    def hear(self, batch: int, weight: float) -> None:
        """The loss weight of a whole batch is known: it rides on gradients."""
        if not math.isnan(weight):
            self._weights.setdefault(batch, (weight, self._steps))

    def weight(self, batch: int) -> float:
        """The loss weight of a whole batch; NaN while it is not known."""
        return self._weights.get(batch, (math.nan, 0))[0]

    def weight_for_update(self, batch: int) -> float:
        """The same for an update, of which there is one per stage; the last one forgets it."""
        weight, left = self._weights.pop(batch, (math.nan, 0))
        assert self._waits or not math.isnan(weight), f"the weight of batch {batch} is not known"
        if left > 1:
            self._weights[batch] = weight, left - 1
        return weight

    def sum(self, batch: int) -> Loss | None:
        """What a last stage hands in for a decision; once."""
        return self._sums.pop(batch, None)

    def forward_done(self, batch: int, evaluation: bool) -> None:
        """Make the report of a batch once its last forward on this rank is done."""
        self._forwards[batch] = self._forwards.get(batch, 0) + 1
        if self._forwards[batch] < self._wanted:
            return
        del self._forwards[batch]
        losses, loss, weight, total = self._losses.pop(batch, None), None, None, 0.0
        if losses is not None:
            total, weight = (sum(part) for part in zip(*((i.total, i.weight) for i in losses.values()), strict=True))
            loss = total / weight if weight else None
        if evaluation:
            self._report = Report(batch, loss, weight, self._recorder.now())
            return
        if weight is not None and self._decides:
            self._sums[batch] = Loss(total, weight)
        if weight is not None and not self._waits:
            self.hear(batch, weight)
        news, evaluated = self._decisions.news(), self._decisions.evaluated()
        self._report = Report(batch, loss, weight, self._recorder.now(), news, evaluated)

    def pending(self) -> Iterator[Report]:
        """Hand the report out only when what the forward made is on its way: the caller may take any time with it."""
        if self._report is not None:
            report, self._report = self._report, None
            start = self._recorder.now()
            yield report
            rank, end, label = self._recorder.rank, self._recorder.now(), f"report of batch {report.batch}"
            self._recorder.add(Interval(rank, "compute", start, end, Waiting.CALLER, label, cause="the caller"))
