"""Spans, one at a time: of training and of evaluation, from an empty pipeline to an empty pipeline."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from penstock.comm.p2p.transport import Channel
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.data.batch_source import Batches, BatchSource
from penstock.runtime.data.microbatches import joined_outputs
from penstock.runtime.engine.lifecycle import Lifecycle, left_behind
from penstock.runtime.engine.span_setup import SpanSetup
from penstock.runtime.execute.evaluation_without_draining import Evaluating, EvaluationData, Evaluator, longer, no_data
from penstock.runtime.execute.executor import Executor
from penstock.runtime.execute.span_barriers import Losses, SpanBorders
from penstock.runtime.ops.bound import STEPPING
from penstock.runtime.rank.batch_reports import Report
from penstock.runtime.rank.snapshot import Saving
from penstock.stage.blocks.loss import Loss, summed
from penstock.stage.checks.changes_between_reports import LoopCheck
from penstock.stage.checks.remotely_trained_modules import HeldElsewhere
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.weights.memory.buffers import NOT_WHOLE
from penstock.weights.update_hooks import SHOWN


class Spans:
    """Runs spans of the ranks in this process, and keeps them consistent in between.

    Args:
        setup: makes what a span runs with.
        held: what this process has of the stages of others.

    Attributes:
        life: whether the pipeline is at rest.
        batches: that have been trained on.
        older: how many versions before the newest the next span begins with.
        evaluated: the last version that no run has to evaluate any more.
        length: how many batches the data of the run that is to begin have; None where that is not known.
        unread: what spans have read ahead of the data, and not trained on.
        reporter: the rank of this process that knows what all have decided.
    """

    def __init__(self, setup: SpanSetup, held: HeldElsewhere | None = None) -> None:
        grid, ranks, combine = setup.grid, setup.ranks, setup.combine
        self._setup, self._grid, self._ranks = setup, grid, ranks
        self.life = Lifecycle(setup.peers)
        self.batches, self.older, self.evaluated = 0, 0, -1
        self.length: int | None = None
        self.unread: list[Any] = []
        self._left_after: int | None = None  # the batch after whose report the caller has left the current run
        self._stop = ranks[0].stop
        stages = [stage for state in ranks for stage in state.stages.values()]
        weights = [stage.weights for stage in stages]
        self._updaters = [each.updater for each in weights if isinstance(each, TrainedWeights)]
        self._borders = SpanBorders(grid, ranks, combine, setup.peers, held)
        alone = grid.group is None or (grid.width == 1 and not any(stage.ties for stage in stages))
        self._loop = LoopCheck([stage.module.tensors for stage in stages], alone=alone)
        entrances = {n.rank for n in setup.schedule.stages if not setup.schedule.predecessors[n.index]}
        self._stop.alone = grid.group is None or grid.width * grid.tensor.size * len(entrances) == 1
        self.reporter = ranks[setup.last if grid.group is None else 0]

    def train(
        self, batches: Batches, save: Saving | None, evaluate: Evaluating | None
    ) -> Generator[Report, None, bool]:
        """Train in one span, after which ranks hear who has left. Returns whether one has."""
        source, start = self._setup.training_data(self._with_rates(batches), self.batches, self.length), self.batches
        self.length = None  # it counts from here
        if not self._begin(source, "run()", trains=True):
            return False
        executors = self._setup.trainers()
        evaluators = [] if evaluate is None else self._evaluators(evaluate, executors)
        older = -self.older
        runs = [
            e.run(source, self.batches, older, at_border=evaluators[i].at_border if evaluators else None, saving=save)
            for i, e in enumerate(executors)
        ]
        self._left_after, left, failed = None, False, None
        try:
            yield from self._run(self._setup.drive(runs, 1), [*executors, *evaluators], True, self._stop.ask)
        finally:
            found, reason = next(((e.failure, e.reason) for e in evaluators if e.failure is not None), (None, None))
            if self.life.broken is None:
                with self.life.together():
                    left, failed = self._borders.end(self._left_after, self.batches, reason, source, start)
                    self.unread += source.unread()
        for failure in (found, source.failure, failed):
            if failure is not None:  # all batches before have been trained on, and reported
                raise failure
        return left

    def _with_rates(self, batches: Batches) -> Batches:
        """Return the batches up to the first one whose update would have no learning rate.

        That one counts as a batch that could not be read, so that all before it are finished. Every batch is taken to
        make an update, because processes must agree on the end before they know which are skipped.
        """
        made = self.batches if self._setup.combine.apart else None
        tables = [(each.rates.scheduled, each.updates if made is None else made) for each in self._updaters]
        known = [(table, updates) for table, updates in tables if table is not None]
        if not known or not hasattr(batches, "__iter__"):
            return batches

        def checked() -> Iterator[Any]:
            for number, batch in enumerate(batches):
                for table, updates in known:
                    table.check(updates + number)
                yield batch

        return checked()

    def _evaluators(self, evaluate: Evaluating, training: Sequence[Executor]) -> list[Evaluator]:
        executors, delay = self._setup.evaluators(Channel.EVALUATION), self._setup.delay
        data = EvaluationData(evaluate, self._setup.evaluation_data, len(self._ranks))
        return [
            Evaluator(state, executor, evaluate, data, self._stop.ask, delay, self.batches, trains)
            for state, executor, trains in zip(self._ranks, executors, training, strict=True)
        ]

    def evaluate(self, batches: Batches, averaged: bool, version: int | None = None) -> Loss:
        """Return the loss sum on batches with the newest weights (or their average), and its weight, on all ranks."""
        call = "evaluate(averaged=True)" if averaged else "evaluate()" if version is None else "an evaluation in run()"
        found: Losses = []
        for report in self._forwards(batches, call, found, averaged=averaged, version=version):
            if report.loss is not None and report.weight:
                found.append([report.loss * report.weight, report.weight, report.numbers])
        totals, weights, numbers = zip(*found, strict=True) if found else ((), (), ())
        return Loss(math.fsum(totals), math.fsum(weights), summed(numbers))

    def predict(self, batches: Batches, averaged: bool) -> Iterator[Any]:
        """Yield what the last stages in this process return for each batch, or None where there are none."""
        last = self._setup.schedule.stage_at[self._setup.schedule.num_stages - 1, 0]
        here = [state.stages[last].passes for state in self._ranks if last in state.stages]
        done: Counter[int] = Counter()
        with closing(self._forwards(batches, "predict()", [], averaged=averaged, predicts=True)) as reports:
            for report in reports:
                done[report.batch] += 1
                if done[report.batch] < len(here):
                    continue  # other pipelines in this process have parts of it
                parts = [part for passes in here for part in (passes.predicted or {}).pop(report.batch, ())]
                if parts or not here:  # else it has failed, of which all hear in the end
                    yield joined_outputs(parts, self._setup.dims) if parts else None

    def _forwards(
        self,
        batches: Batches,
        call: str,
        found: Losses,
        *,
        averaged: bool,
        version: int | None = None,
        predicts: bool = False,
    ) -> Generator[Report]:
        """Run forwards only, and yield a report of each batch of each pipeline here.

        Args:
            batches: the data.
            call: of the user, for messages.
            found: the losses here, which the caller adds on the way; in the end those of all ranks.
            averaged, version: the weights that are read.
            predicts: keep what last stages return, and compute no loss.
        """
        kinds = [stage.weights for state in self._ranks for stage in state.stages.values()]
        if averaged and not all(weights.keeps_average for weights in kinds):
            raise ConfigError("there are no averaged weights; give the pipeline a decay, such as ema_decay=0.999")
        source, failed, count = self._setup.evaluation_data(batches), None, 0
        if not self._begin(source, call, trains=False):
            if version is not None:  # within a run
                raise no_data()
            return
        executors = self._setup.evaluators(Channel.TRAINING)
        reports = self._setup.drive([e.run(source, self.batches, 0) for e in executors], self._grid.width)
        try:
            with ExitStack() as stack:
                stack.enter_context(source.interruptible(self.reporter.recorder.rank, self._stop.alone))
                for state in self._ranks:
                    stack.enter_context(state.evaluating(averaged, version, predicts=predicts))
                run = stack.enter_context(closing(self._run(reports, executors, training=False, leave=source.end_soon)))
                for report in run:
                    count += 1
                    yield report
        finally:
            if self.life.broken is None:  # others wait for this, also where the caller has left
                sees_end = self._grid.group is not None and source.failure is None and self.reporter.has_loss
                if sees_end and source.follows(count):
                    source.fail(longer(count))
                with self.life.together():
                    reason = source.reason(self.reporter.recorder.rank)
                    found[:], failed = self._borders.gather_losses(found, reason)
        for failure in (source.failure, failed):
            if failure is not None:
                raise failure

    def _begin(self, source: BatchSource, call: str, *, trains: bool) -> bool:
        """Prepare a span; return whether there is a first batch, on which all ranks agree."""
        with self.life.together():
            entrance = self._setup.schedule.stage_at[0, 0].rank
            return self._borders.begin(source, self.batches, entrance, call, trains=trains)

    def _run(
        self,
        reports: Iterator[Report],
        parties: Sequence[Executor | Evaluator],
        training: bool,
        leave: Callable[[], None],
    ) -> Generator[Report]:
        """Yield reports until the pipeline is empty again, also when the caller leaves the loop early (`leave`)."""
        count, self.life.running, watched = 0, True, ExitStack()
        try:
            try:
                watched.enter_context(self._setup.peers.during())
                for report in reports:
                    count += 1
                    self.reporter.recorder.doing = f"rank {self.reporter.recorder.rank}, in the loop over reports"
                    summing = self._grid.group is not None and _summing(parties)
                    before = self._loop.counts(first=count == 1, summing=summing)
                    yield report
                    self._loop.check(before, first=count == 1, summing=summing)
            except GeneratorExit:  # the caller has left the loop: finish what is under way
                if not self.life.abandoned and not sys.is_finalizing():  # at exit, no module can be relied on
                    self._left_after = self.batches + count - 1
                    leave()
                    unseen = list(reports)
                    count += len(unseen)
                    self.reporter.decisions.events.give_back(
                        [d for report in unseen for d in report.decided], [e for r in unseen for e in r.evaluated]
                    )
                else:
                    self.life.broken = PenstockError("the run was abandoned")
                raise
        except GeneratorExit:
            raise
        except BaseException as error:
            self.life.broken = error
            raise
        finally:
            watched.close()
            self.life.running = False
            for party in parties:
                party.close()
            if self.life.broken is None:
                if training:
                    self.batches += count
                    self.older = min(self.older + count, self._setup.delay)
                for state in self._ranks:
                    state.recorder.pause()
                    for stage in state.stages.values():
                        stage.restore()
                        stage.weights.end_span()
            elif not sys.is_finalizing():
                self._give_up(self.life.broken, parties, count, training=training)

    def _give_up(
        self, error: BaseException, parties: Sequence[Executor | Evaluator], count: int, *, training: bool
    ) -> None:
        """Leave peers the reason why a run cannot go on, and the caller what is lost."""
        self._setup.peers.leave(error)
        if training:
            last = max(party.begun for party in parties if isinstance(party, Executor))
            self.life.advice = self._left_behind(error, self.batches + count, last)
            error.add_note(self.life.advice)

    def _left_behind(self, error: BaseException, first: int, last: int) -> str:
        """Give the modules here the newest weights after an error in training; say what is lost, and how to go on."""
        versions, whole = dict[int, list[str]](), True
        for stage in (stage for state in self._ranks for stage in state.stages.values()):
            try:
                if isinstance(stage.weights, TrainedWeights):
                    versions.setdefault(stage.weights.store.newest, []).append(stage.module.where)
                    whole &= stage.weights.store.master.epoch != NOT_WHOLE
                if whole:
                    stage.restore()
            except Exception:  # a second error must not hide the first
                whole = False
        said = " ".join(getattr(error, "__notes__", ()))
        half = STEPPING in said and SHOWN not in said
        under_way = range(min(versions, default=first) - half, last + 1)
        return left_behind(under_way, versions, whole=whole, half=half, alone=self._grid.group is None)


def _summing(parties: Sequence[Executor | Evaluator]) -> bool:
    return any(isinstance(party, Executor) and party.summing for party in parties)
