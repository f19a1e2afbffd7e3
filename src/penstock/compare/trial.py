"""One run of a comparison: a method, a seed and a learning rate, trained by a real pipeline in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from penstock.compare.config import ComparisonConfig
from penstock.compare.grid import Key
from penstock.compare.held_out import Gatherer, Score, Scorer
from penstock.compare.prepared_contender import PreparedContender, make_optimizers, make_trial_pipeline
from penstock.compare.tasks import Task, training_batches
from penstock.runtime.from_checked_plan import continue_under
from penstock.runtime.rank.batch_reports import Report
from penstock.weights.decision import Decision

Told = Callable[[int, float], None]
"""Called after each batch with the number of batches done and the loss of the last one."""


@dataclass(frozen=True)
class TrialResult:
    """The result of a run.

    Attributes:
        key: identifies the run.
        scores: evaluations, the first one of the initial weights.
        losses: of every batch, at the weights that its forwards read.
        norms: of the gradient of every update, before clipping.
        diverged: the number of batches after which divergence was noticed; None if it did not diverge.
        seconds: the duration.
    """

    key: Key
    scores: tuple[Score, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    diverged: int | None
    seconds: float


def run_trial(config: ComparisonConfig, task: Task, prepared: PreparedContender, key: Key, tell: Told) -> TrialResult:
    """Train one run to its end, or until it diverges.

    Args:
        config: of the comparison.
        task: model and data.
        prepared: the method.
        key: identifies the run.
        tell: called after each batch.

    Raises:
        PenstockError: see `Pipeline`. A loss that is not finite or grows is a result, not an error.
    """
    begun = time.perf_counter()
    trial = _Trial(config, task, prepared, key)
    trial.train(tell)
    count = len(trial.losses) if trial.diverged is None else trial.diverged
    losses = tuple(trial.losses.get(batch, math.nan) for batch in range(count))
    found = trial.norms()
    norms = tuple(found.get(batch, math.nan) for batch in range(count))
    return TrialResult(key, tuple(trial.scores), losses, norms, trial.diverged, time.perf_counter() - begun)


class _Trial:
    """The state of a run."""

    def __init__(self, config: ComparisonConfig, task: Task, prepared: PreparedContender, key: Key) -> None:
        self._config, self._task, self._key = config, task, key
        self._model = prepared.model
        self._scorer = Scorer(task, key.seed, config.evaluate.samples, config.device)
        every = config.evaluate.every
        wanted = range(every, config.batches, every)
        self._gatherer = Gatherer(make_optimizers(config, key.lr), wanted)
        self._pipeline = make_trial_pipeline(self._model, prepared.opening or prepared.plan, key.seed, self._gatherer)
        self._prepared = prepared
        self._decided: dict[int, float] = {}  # update -> norm before clipping
        self.losses: dict[int, float] = {}
        self.scores = [self._scorer.score(0)]
        self.diverged: int | None = None
        self._limit = config.spike * self.scores[0].loss

    def train(self, tell: Told) -> None:
        """Train all batches, or fewer if the run diverges."""
        config = self._config
        sizes = config.batches, config.microbatches, config.microbatch_size
        batches = training_batches(self._task, self._key.seed, *sizes)
        data = ([self._model.pair(*sample) for sample in batch] for batch in batches)
        if self._prepared.opening is not None:
            self._run(islice(data, self._prepared.contender.sync), tell)
            continue_under(self._pipeline, self._prepared.plan)
        if self.diverged is None:
            self._run(data, tell)
        if self.diverged is None:
            self._score(config.batches, self._pipeline.state_dict())

    def _run(self, data: Iterator[list[Any]], tell: Told) -> None:
        """Train the batches of one method, or fewer if the run diverges."""
        for report in self._pipeline.run(data):
            self._evaluate()  # versions that became complete before this batch ended
            self._report(report)
            tell(report.batch + 1, self.losses.get(max(self.losses, default=0), math.nan))
            if self.diverged is not None:
                break
        self._decisions(self._pipeline.decided())
        self._evaluate()

    def norms(self) -> dict[int, float]:
        """Return the gradient norm of every update, before clipping where it was decided globally."""
        return self._gatherer.norms() | self._decided

    def _report(self, report: Report) -> None:
        self._lose(report.batch, math.nan if report.loss is None else report.loss)
        self._decisions(report.decided)

    def _decisions(self, decided: Iterable[Decision]) -> None:
        for d in decided:
            if self._config.max_grad_norm is not None:
                self._decided[d.batch] = d.norm
            if d.skipped:
                self._diverge(d.batch + 1)

    def _lose(self, batch: int, loss: float) -> None:
        if self.diverged is not None:
            return
        self.losses[batch] = loss
        every = self._config.evaluate.every
        recent = [self.losses[t] for t in range(batch + 1 - every, batch + 1) if t in self.losses]
        if not math.isfinite(loss) or (len(recent) == every and sum(recent) / every > self._limit):
            self._diverge(batch + 1)

    def _evaluate(self) -> None:
        """Evaluate the versions that are complete."""
        for updates, weights in self._gatherer.complete():
            if self.diverged is None:
                self._score(updates, weights)

    def _score(self, updates: int, weights: Mapping[str, Tensor]) -> None:
        self.scores.append(self._scorer.score(updates, self._model.whole(weights)))
        if not self.scores[-1].loss <= self._limit:
            self._diverge(updates)

    def _diverge(self, batches: int) -> None:
        if self.diverged is None:
            self.diverged = batches
