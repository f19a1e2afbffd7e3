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
from penstock.compare.contender_run import Key, Score, TrialResult
from penstock.compare.prepared_contender import PreparedContender


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluation of one run; the fields are the columns of results.csv, which docs/compare.md explains."""

    method: str
    seed: int
    lr: float
    updates: int
    samples: int
    tokens: int
    simulated_time: float  # when the last stage has made the update, in forwards of a rank's whole share
    training_loss: float | None  # mean since the evaluation before; losses are at the weights that were read
    validation_loss: float | None
    gradient_norm: float | None  # mean since the evaluation before, before clipping; None where nothing is clipped
    delay_forward: str  # per stage, separated by spaces
    delay_backward: str
    diverged: bool  # whether the run ended here because it diverged


@dataclass(frozen=True)
class MethodSummary:
    """The results of a contender at its best rate; the fields are the columns of summary.csv."""

    method: str
    lr: float
    runs: int  # that have finished at this rate
    diverged: int  # how many of them; all following figures are of the others
    loss: float | None  # on held-out samples at the end, mean over seeds
    spread: float | None  # its sample standard deviation
    difference: float | None  # from the synchronous baseline in %, mean over the seeds that both have
    difference_spread: float | None
    verdict: str  # "not resolved": the spread of the differences is not smaller than their mean; "-": no baseline
    simulated_time: float  # of all updates
    delay: float  # the longest of any stage, in forward or backward
    seconds: float  # mean duration of a run


@dataclass(frozen=True)
class Findings:
    """All results of a comparison so far: those of the runs that have finished."""

    config: ComparisonConfig
    contenders: Sequence[PreparedContender]
    results: Mapping[Key, TrialResult]

    @property
    def title(self) -> str:
        """Model and data in one line, for display."""
        run = self.contenders[0].run
        return f"{run.model.shape.described}; {run.windows.corpus.described}"

    def other_settings(self) -> list[str]:
        """List settings of methods' papers that differ from those here; `penstock train` would use the papers'."""
        found = []
        for prepared in self.contenders:
            for key, value in prepared.run.config.row.settings.items():
                section, _, name = key.partition(".")
                here = getattr(prepared.run.config.optimizer, name) if section == "optimizer" else value
                if here != value:
                    found.append(f"{prepared.label}: its paper has {key}={value}, here it has {here}")
        return found

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
        scores = [*result.scores]
        if result.diverged is not None and (not scores or scores[-1].updates < result.diverged):
            scores.append(Score(result.diverged, math.nan))
        starts = [0, *(score.updates for score in scores)]
        return [self._row(prepared, result, score, start) for start, score in zip(starts, scores, strict=False)]

    def _row(self, prepared: PreparedContender, result: TrialResult, score: Score, before: int) -> EvaluationRow:
        run = prepared.run
        delays = [" ".join(f"{d:g}" for d in delays) for delays in (prepared.delays_forward, prepared.delays_backward)]
        return EvaluationRow(
            *result.key,
            score.updates,
            score.updates * run.microbatches * run.config.microbatch_size,
            score.updates * run.tokens_per_batch,
            prepared.times[score.updates],
            _mean(result.losses[before : score.updates]),
            finite_or_none(score.loss),
            _mean(result.norms[before : score.updates]),
            delays[0],
            delays[1],
            result.diverged is not None and score.updates >= result.diverged,
        )

    def at_best_rate(self, prepared: PreparedContender) -> list[TrialResult]:
        """Return the runs of a method at its best rate; none if none has finished."""
        best = self.best_rate(prepared)
        return [found for key, found in self.results.items() if (key.method, key.lr) == (prepared.label, best)]

    def best_rate(self, prepared: PreparedContender) -> float | None:
        """Return the rate with the fewest diverged runs, then with the lowest mean loss; None if none has finished."""

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
