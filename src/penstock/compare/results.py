"""The results of a comparison: a row per evaluation, and a summary of every method."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.checks import finite_or_none
from penstock.compare.config import ComparisonConfig
from penstock.compare.grid import Key
from penstock.compare.held_out import Score
from penstock.compare.prepared_contender import PreparedContender
from penstock.compare.tasks import Task
from penstock.compare.trial import TrialResult


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluation of one run; the fields are the columns of results.csv.

    Attributes:
        method, seed, lr: identify the run.
        updates: the number of updates made.
        samples, tokens: the training data used so far; no tokens where the task has none.
        simulated_time: when the last stage has made the update, in units of a forward of a rank's whole share.
        training_loss: mean over the batches since the previous evaluation, each at the weights that it read.
        validation_loss: mean over held-out samples.
        accuracy: fraction of correct units.
        gradient_norm: mean over the updates since the previous evaluation, before clipping.
        delay_forward, delay_backward: per stage, separated by spaces.
        diverged: whether the run ended here because it diverged.
    """

    method: str
    seed: int
    lr: float
    updates: int
    samples: int
    tokens: int | None
    simulated_time: float
    training_loss: float | None
    validation_loss: float | None
    accuracy: float | None
    gradient_norm: float | None
    delay_forward: str
    delay_backward: str
    diverged: bool


@dataclass(frozen=True)
class MethodSummary:
    """The results of a method at its best rate; the fields are the columns of summary.csv.

    Attributes:
        method: its label.
        lr: the best rate: among the seeds that all rates were tried with, the one with the fewest diverged runs, then
            with the lowest mean validation loss at the end.
        runs: the number of finished runs at this rate.
        diverged: how many of them diverged; all following figures are of the others.
        loss, spread: mean and sample standard deviation over seeds of the validation loss at the end.
        accuracy: mean over seeds.
        difference: of the loss from that of the synchronous baseline in %, mean over the seeds that both have.
        difference_spread: its sample standard deviation.
        verdict: "baseline", "worse", "better", "equal", "not resolved" if the spread over seeds is not smaller than the
            difference (or there is only one seed), "diverged", or "-" without a baseline.
        simulated_time: of all updates.
        delay: the largest delay of any stage, in forward or backward.
        seconds: mean duration of a run in this process.
    """

    method: str
    lr: float
    runs: int
    diverged: int
    loss: float | None
    spread: float | None
    accuracy: float | None
    difference: float | None
    difference_spread: float | None
    verdict: str
    simulated_time: float
    delay: float
    seconds: float


@dataclass(frozen=True)
class Findings:
    """All results of a comparison so far.

    Attributes:
        config: of the comparison.
        task: model and data.
        contenders: the methods.
        results: of the runs that have finished.
    """

    config: ComparisonConfig
    task: Task
    contenders: Sequence[PreparedContender]
    results: Mapping[Key, TrialResult]

    @property
    def baseline(self) -> PreparedContender | None:
        """The first method without delay, if there is one."""
        return next((prepared for prepared in self.contenders if prepared.synchronous), None)

    def rows(self) -> list[EvaluationRow]:
        """Return all evaluations, run by run."""
        contenders = {prepared.label: prepared for prepared in self.contenders}
        return [row for key, found in self.results.items() for row in self.rows_of(contenders[key.method], found)]

    def rows_of(self, prepared: PreparedContender, result: TrialResult) -> list[EvaluationRow]:
        """Return the evaluations of a run; if it diverged, also a row for that moment."""
        rows, before = [], 0
        for score in result.scores:
            rows.append(self._row(prepared, result, score, before, diverged=False))
            before = score.updates
        if result.diverged is not None:
            last = result.scores[-1]
            end = last if last.updates >= result.diverged else Score(result.diverged, math.nan, None)
            rows = rows[:-1] if end is last else rows
            before = rows[-1].updates if rows else 0
            rows.append(self._row(prepared, result, end, before, diverged=True))
        return rows

    def _row(
        self, prepared: PreparedContender, result: TrialResult, score: Score, before: int, *, diverged: bool
    ) -> EvaluationRow:
        samples = score.updates * self.config.microbatches * self.config.microbatch_size
        delays = [" ".join(f"{d:g}" for d in delays) for delays in (prepared.delays_forward, prepared.delays_backward)]
        return EvaluationRow(
            *result.key,
            score.updates,
            samples,
            samples * self.task.units if self.task.unit == "tokens" else None,
            prepared.times[score.updates],
            _mean(result.losses[before : score.updates]),
            finite_or_none(score.loss),
            score.accuracy,
            _mean(result.norms[before : score.updates]),
            delays[0],
            delays[1],
            diverged,
        )

    def at_best_rate(self, prepared: PreparedContender) -> list[TrialResult]:
        """Return the runs of a method at its best rate; none if none has finished."""
        best = self.best_rate(prepared)
        return [found for key, found in self.results.items() if (key.method, key.lr) == (prepared.label, best)]

    def best_rate(self, prepared: PreparedContender) -> float | None:
        """Return the best rate (see `MethodSummary.lr`); None if no run has finished."""

        def badness(lr: float) -> tuple[int, float]:
            ends = [_end(result) for result in runs[lr]]
            fine = [end for end in ends if end is not None]
            return len(ends) - len(fine), statistics.fmean(fine) if fine else math.inf

        runs = self.by_rate(prepared)
        return min(runs, key=badness, default=None)

    def by_rate(self, prepared: PreparedContender) -> dict[float, list[TrialResult]]:
        """Group the finished runs of a method by learning rate, for the seeds that all rates were tried with.

        Rates that have fewer runs than others are left out.
        """
        runs: dict[float, list[TrialResult]] = {}
        for key, result in self.results.items():
            if key.method == prepared.label and key.seed < self.config.tuned:
                runs.setdefault(key.lr, []).append(result)
        most = max(map(len, runs.values()), default=0)
        return {lr: found for lr, found in runs.items() if len(found) == most}

    def summaries(self) -> list[MethodSummary]:
        """Return the summary of every method with a finished run."""
        base = self.baseline
        reference = {} if base is None else _ends(self.at_best_rate(base))
        return [
            self._summary(prepared, found, base, reference)
            for prepared in self.contenders
            if (found := self.at_best_rate(prepared))
        ]

    def _summary(
        self,
        prepared: PreparedContender,
        found: Sequence[TrialResult],
        base: PreparedContender | None,
        reference: Mapping[int, float],
    ) -> MethodSummary:
        ends = _ends(found)
        accuracies = [r.scores[-1].accuracy for r in found if r.diverged is None]
        differences = [100 * (ends[seed] / reference[seed] - 1) for seed in ends if seed in reference]
        mean = _mean(differences)
        diverged = sum(result.diverged is not None for result in found)
        if prepared is base:
            mean, differences = None, []
        return MethodSummary(
            prepared.label,
            found[0].key.lr,
            len(found),
            diverged,
            _mean(ends.values()),
            _spread(ends.values()),
            _mean(a for a in accuracies if a is not None),
            mean,
            _spread(differences),
            "baseline" if prepared is base else "diverged" if diverged == len(found) else _verdict(differences),
            prepared.times[-1],
            max((*prepared.delays_forward, *prepared.delays_backward)),
            statistics.fmean(result.seconds for result in found),
        )


def as_csv(
    rows: Sequence[EvaluationRow] | Sequence[MethodSummary], kind: type[EvaluationRow] | type[MethodSummary]
) -> str:
    """Format a table with a header as CSV; unknown values are empty, numbers are exact."""
    text = io.StringIO()
    names = list(kind.__dataclass_fields__)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values: dict[str, Any] = vars(row)
        writer.writerow({name: "" if values[name] is None else values[name] for name in names})
    return text.getvalue()


def _end(result: TrialResult) -> float | None:
    """Return the validation loss at the end; None if the run diverged."""
    return None if result.diverged is not None else result.scores[-1].loss


def _ends(results: Iterable[TrialResult]) -> dict[int, float]:
    """Return the validation losses at the end by seed, without diverged runs."""
    return {result.key.seed: end for result in results if (end := _end(result)) is not None}


def _verdict(differences: Sequence[float]) -> str:
    if not differences:
        return "-"
    if not any(differences):
        return "equal"
    spread, mean = _spread(differences), statistics.fmean(differences)
    if spread is None or spread >= abs(mean):
        return "not resolved"
    return "worse" if mean > 0 else "better"


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return finite_or_none(sum(known) / len(known)) if known else None


def _spread(values: Iterable[float]) -> float | None:
    """Return the sample standard deviation; None for fewer than two values."""
    known = list(values)
    return statistics.stdev(known) if len(known) > 1 else None
