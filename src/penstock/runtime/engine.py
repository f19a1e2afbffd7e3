"""The engine: it runs a pipeline span by span, and keeps it consistent between spans.

A span is what lies between two drains. Training is one span per run where evaluations and snapshots fit between two
batches, and one span from each to the next where the pipeline must be drained for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from penstock.comm.communicators import connect, holders_of
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.ticket import LATENCY, Polling
from penstock.comm.mesh import Groups
from penstock.comm.p2p.routing import reads_of
from penstock.comm.p2p.transport import Channel
from penstock.comm.transports import Transports
from penstock.errors import ConfigError, PenstockError, TransportError
from penstock.runtime.execute.evaluation import Evaluating, EvaluationData, Evaluator, no_data, readable
from penstock.runtime.execute.executor import Executor
from penstock.runtime.execute.run_loop import Run, drive_all, drive_one
from penstock.runtime.execute.span_borders import SpanBorders
from penstock.runtime.options.kernels import Kernels
from penstock.runtime.rank.batch_source import Batches, BatchSource, Portions
from penstock.runtime.rank.reports import Report
from penstock.runtime.rank.scheduled_batches import Schedules
from penstock.runtime.rank.snapshot import Saving, Snapshot, take_snapshot
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.update.events import Evaluated
from penstock.schedule.ir.rules import RULES
from penstock.schedule.methods.combine import REDUCE, Combine
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.proof.check import Proof
from penstock.schedule.proof.stage_spec import stage_specs
from penstock.stage.checks.held_elsewhere import HeldElsewhere
from penstock.stage.checks.touched_gradients import GradientWatch
from penstock.weights.corrections.base import Correction
from penstock.weights.decision import add_shares


class Halt(NamedTuple):
    """A moment of a run at which the pipeline is drained, for all ranks to do something together.

    Attributes:
        at: the batch before which that is.
        act: what they do; it may switch to another schedule.
    """

    at: int
    act: Callable[[], None]


class Engine:
    """Runs the ranks of this process, of one pipeline or several parallel ones.

    Args:
        grid: all ranks.
        ranks: those of this process.
        proof: of the training schedule.
        forward_only: of the schedule of evaluations.
        transports: carry their messages.
        holder_groups: of those that hold the same weights; empty where gradients are added in order.
        timeout: seconds after which a missing message is an error.
        kernels: settings of torch that are made while passes run.
        combine: how parallel pipelines agree.
        polling: how this process waits, where it has one rank.
        correction: of the method.
        held: what this process has of the stages of others.

    Attributes:
        batches: that have been trained on.
        keeps_older: the next span begins with two versions, where the rule has two.
    """

    def __init__(
        self,
        grid: RankGrid,
        ranks: Sequence[RankState],
        proof: Proof,
        forward_only: Proof,
        transports: Transports,
        holder_groups: Groups,
        timeout: float,
        kernels: Kernels,
        combine: Combine = REDUCE,
        polling: Polling = LATENCY,
        correction: Correction | None = None,
        held: HeldElsewhere | None = None,
    ) -> None:
        self._polling, self._kernels = polling, kernels
        self._grid, self._ranks, self._timeout, self._combine = grid, ranks, timeout, combine
        self._proof, self._forward_only = proof, forward_only
        self._transports, self._holder_groups = transports, holder_groups
        self.schedule = proof.schedule
        self.batches, self.keeps_older = 0, False
        self._reads_ahead = _reads_ahead(correction)
        self._bases = RULES[self.schedule.rule].bases
        self._broken: BaseException | None = None
        self._running = self._abandoned = False
        self._data: Iterator[Any] | None = None  # of the current run, if it was an iterator
        self._unread: list[Any] = []  # what was read ahead of it
        self._left_after: int | None = None  # the batch after whose report the caller has left the current run
        self._stop = ranks[0].stop
        stages = [stage for state in ranks for stage in state.stages.values()]
        self._schedules = Schedules(ranks[0].lr_scheduler, stages, grid)
        self._borders = SpanBorders(grid, ranks, combine, held)
        alone = grid.group is None or (grid.width == 1 and not any(stage.ties for stage in stages))
        self._watch = GradientWatch(  # where no sum may be changing gradients beside the caller
            stage.module for stage in (stages if alone else ())
        )
        self._last = self.schedule.stage_at[self.schedule.num_stages - 1, 0].rank
        entrances = {n.rank for n in self.schedule.stages if not self.schedule.predecessors[n.index]}
        self._stop.alone = grid.group is None or grid.width * len(entrances) == 1
        self.reporter = ranks[self._last if grid.group is None else 0]

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self,
        batches: Batches,
        save: Saving | None,
        evaluate: Evaluating | None,
        halts: Callable[[], Halt | None] = lambda: None,
    ) -> Generator[Report]:
        """Train on batches, in one span or, where the pipeline must be drained on the way, several.

        Args:
            batches: the data.
            save, evaluate: on the way.
            halts: asked when the run begins whether it halts on the way.
        """
        if not torch.is_grad_enabled():
            raise ConfigError("training needs gradients, but run() was called under torch.no_grad()")
        self.check_idle()
        self._stop.reset()
        batches = self._with_unread(batches)
        halt = halts()
        if halt is None:
            yield from self._train_spans(batches, save, evaluate)
            return
        parts = Portions(batches)
        # A snapshot from there is taken afterwards, so that a run that resumes from it goes on alike.
        before = None if save is None else save._replace(make_room=lambda b: b != halt.at and save.make_room(b))
        left = yield from self._train_spans(parts.next(halt.at - self.batches), before, evaluate)
        if left or self.batches < halt.at:
            return
        with self._together():
            halt.act()
        if save is not None and save.wants(self.batches) and save.make_room(self.batches):
            for snapshot in self.snapshots():
                save.sink(snapshot)
        yield from self._train_spans(parts.next(), save, evaluate)

    def _with_unread(self, batches: Batches) -> Batches:
        """The data, after what an earlier run has read ahead of the same iterator, but not trained on."""
        unread = self._unread if batches is self._data else []
        self._data, self._unread = (batches if isinstance(batches, Iterator) else None), []
        return chain(unread, batches) if unread else batches

    def _train_spans(
        self, batches: Batches, save: Saving | None, evaluate: Evaluating | None
    ) -> Generator[Report, None, bool]:
        """Train in as many spans as snapshots and evaluations ask for; returns whether a rank has left."""
        stays_full = self._proof.border_fault() is None and not self._combine.spec.drains
        if (save is None and evaluate is None) or stays_full:
            return (yield from self._train_once(batches, save, evaluate))
        rest = iter(batches)
        while True:
            size = min(plan.every - self.batches % plan.every for plan in (save, evaluate) if plan is not None)
            before = self.batches
            left = yield from self._train_once(islice(rest, size), None, None)
            if left or self.batches - before < size:
                return left
            if evaluate is not None and evaluate.wants(self.batches):
                self._evaluate_now(evaluate, self.batches)
            if save is not None and save.wants(self.batches) and save.make_room(self.batches):
                for snapshot in self.snapshots():
                    save.sink(snapshot)

    def _train_once(
        self, batches: Batches, save: Saving | None, evaluate: Evaluating | None
    ) -> Generator[Report, None, bool]:
        """Train in one span, after which ranks hear who has left. Returns whether one has."""
        self.check_idle()
        with self._together():
            scheduled = self._schedules.limit(batches, self.batches if self._combine.apart else None)
        source = self._open(scheduled, evaluates=False)
        if not self._begin(source, trains=True):
            return False
        executors = self._executors(self._proof)
        evaluators = [] if evaluate is None else self._evaluators(evaluate, executors)
        older = -1 if self.keeps_older and self._bases == 2 else 0
        runs = [
            e.run(source, self.batches, older, at_border=evaluators[i].at_border if evaluators else None, saving=save)
            for i, e in enumerate(executors)
        ]
        self._left_after, left, failed = None, False, None
        try:
            yield from self._span(self._drive(runs, 1), [*executors, *evaluators], training=True)
        finally:
            found = next((evaluator.failure for evaluator in evaluators if evaluator.failure is not None), None)
            if self._broken is None:
                with self._together():
                    left, failed = self._borders.end(self._left_after, self.batches, found, source.failure)
                    self._unread += source.unread()
        for failure in (found, source.failure, failed):
            if failure is not None:  # all batches before have been trained on, and reported
                raise failure
        return left

    def _evaluators(self, evaluate: Evaluating, training: Sequence[Executor]) -> list[Evaluator]:
        executors, delay = self._executors(self._forward_only, Channel.EVALUATION), self._bases - 1
        lacks = self.batches if delay and not self._has_older else None
        data = EvaluationData(evaluate, partial(self._open, evaluates=True), len(self._ranks))
        return [
            Evaluator(state, executor, evaluate, data, self.ask_to_stop, delay, lacks, trains)
            for state, executor, trains in zip(self._ranks, executors, training, strict=True)
        ]

    def _span(
        self, reports: Iterator[Report], parties: Sequence[Executor | Evaluator], training: bool
    ) -> Iterator[Report]:
        """Yield reports until the pipeline is empty again, also when the caller leaves the loop early."""
        count, self._running = 0, True
        try:
            try:
                for report in reports:
                    count += 1
                    self._watch.note()
                    yield report
                    self._watch.check()
            except GeneratorExit:  # the caller has left the loop: finish what is under way
                if not self._abandoned and not sys.is_finalizing():  # at exit, no module can be relied on
                    self._left_after = self.batches + count - 1
                    self.ask_to_stop()
                    unseen = list(reports)
                    count += len(unseen)
                    self.reporter.decisions.events.give_back(
                        [d for report in unseen for d in report.decided], [e for r in unseen for e in r.evaluated]
                    )
                else:
                    self._broken = PenstockError("the run was abandoned")
                raise
        except GeneratorExit:
            raise
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._running = False
            for party in parties:
                party.close()
            if self._broken is None:
                if training:
                    self.batches += count
                    self.keeps_older = self.keeps_older or count > 0
                for state in self._ranks:
                    state.recorder.pause()
                    for stage in state.stages.values():
                        stage.restore()
                        stage.weights.end_span()

    def ask_to_stop(self) -> None:
        """Request that the current run ends."""
        self._stop.ask()

    def break_off(self, error: BaseException) -> None:
        """Mark the pipeline as broken: nothing can go on any more."""
        self._broken = error

    def abandon(self) -> None:
        """Do not finish the batches in flight when the caller leaves the loop."""
        self._abandoned = True

    # --- between runs -----------------------------------------------------------------------------------------------

    def switch(self, proof: Proof, correction: Correction | None, evaluate: Evaluating | None) -> None:
        """Continue under another schedule with the same stages, with the pipeline drained.

        Args:
            proof: of the schedule.
            correction: of its method.
            evaluate: evaluations of the runs before and after. The last versions are evaluated now, where the schedule
                before would have done it at its next border, and this one does not any more.
        """
        bases = RULES[proof.schedule.rule].bases
        if evaluate is not None:
            since = self.batches + 1 - (self._bases if self._proof.border_fault() is None else 0)
            drains = proof.border_fault() is not None
            until = self.batches + 1 if drains else self.batches - (self._bases == bases == 2)
            for version in range(since, until):
                if evaluate.wants(version) and (version == self.batches or self._has_older):
                    self._evaluate_now(evaluate, version)
        self.keeps_older = self.keeps_older and self._bases == bases == 2
        self._proof, self.schedule, self._bases = proof, proof.schedule, bases
        self._reads_ahead = _reads_ahead(correction)
        try:
            for state in self._ranks:
                state.switch(proof, self.keeps_older, correction)
        except BaseException as error:
            self.break_off(error)  # some stages may have been switched
            raise

    @property
    def _has_older(self) -> bool:
        """Whether the version before the newest can be evaluated; of one that was read ahead only the prediction is."""
        return self.keeps_older and not self._reads_ahead

    def widen(self, proof: Proof) -> None:
        """Continue under the same schedule with another window, of which stages know nothing."""
        self._proof, self.schedule = proof, proof.schedule

    def _evaluate_now(self, evaluate: Evaluating, version: int) -> None:
        """Evaluate one of the versions that exist, with the pipeline drained."""
        total, weight = self.evaluate(readable(evaluate), averaged=False, version=version)
        for state in self._ranks:
            state.decisions.events.evaluated_everywhere(Evaluated(version, total, weight))

    def evaluate(self, batches: Batches, averaged: bool, version: int | None = None) -> tuple[float, float]:
        """Return the loss sum on batches with the newest weights (or their average), and its weight, on all ranks."""
        kinds = [stage.weights for state in self._ranks for stage in state.stages.values()]
        if averaged and not all(weights.keeps_average for weights in kinds):
            raise ConfigError("there are no averaged weights; give the pipeline a decay, such as ema_decay=0.999")
        self.check_idle()
        source, found, failed = self._open(batches, evaluates=True), [], None
        if not self._begin(source, trains=False):
            if version is not None:  # within a run
                raise no_data()
        else:
            executors = self._executors(self._forward_only)
            reports = self._drive([e.run(source, self.batches, 0) for e in executors], self._grid.width)
            with ExitStack() as stack:
                for state in self._ranks:
                    stack.enter_context(state.evaluating(averaged, version))
                for r in self._span(reports, executors, training=False):
                    if r.loss is not None and r.weight:
                        found.append([r.loss * r.weight, r.weight])
            with self._together():
                found, failed = self._borders.gather_losses(found, source.failure)
            for failure in (source.failure, failed):
                if failure is not None:
                    raise failure
        return math.fsum(total for total, _ in found), math.fsum(weight for _, weight in found)

    def snapshots(self) -> list[Snapshot]:
        """Take a snapshot of every stage in this process, with the pipeline drained."""
        self.check_idle()
        found = []
        for state in self._ranks:
            for stage in state.stages.values():
                stage.refresh()
                found.append(take_snapshot(stage, self.batches, state.decisions))
        return found

    # --- the beginning of a span ------------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether no run is in progress and none has broken."""
        return self._broken is None and not self._running

    def check_idle(self, instead: str = "") -> None:
        """Raise where a run is in progress or has broken.

        Args:
            instead: what to write within a run, for the message.

        Raises:
            PenstockError: it is or has.
        """
        if self._broken is not None:
            why = f"{type(self._broken).__name__}: {self._broken}".rstrip(": ").splitlines()[0]
            raise PenstockError(
                f"the pipeline broke in an earlier run and cannot go on ({why:.120}); make a new one, and load its "
                "last checkpoint"
            ) from self._broken
        if self._running:
            raise PenstockError(
                "a run or an evaluation of this pipeline is under way; end it first: go on to its end, leave its loop "
                f"with break, or call close() on what run() returned{instead and f'. {instead}'}"
            )

    def _open(self, batches: Batches, *, evaluates: bool) -> BatchSource:
        schedule = self._forward_only.schedule if evaluates else self.schedule
        reads, pipelines = reads_of(schedule, {key.rank for key in self._grid.local}), len(self._grid.pipelines)
        m, width, shared = schedule.microbatches, self._grid.width, self._grid.group is None
        if evaluates:  # counts its own batches
            return BatchSource(batches, m, width, reads, pipelines, fills=True, shared=shared)
        ahead = 0 if shared or not any(reads) else self._ahead()
        return BatchSource(
            batches, m, width, reads, pipelines, self._stop,
            shared=shared, first=self.batches, ahead=ahead, overlap=self._proof.reading().overlap,
        )  # fmt: skip

    def _ahead(self) -> int:
        """How far this rank reads ahead: not where it alone announces batches, or pipelines meet now and then."""
        entrance = self.schedule.stage_at[0, 0].rank in {key.rank for key in self._grid.local}
        if self._combine.apart or (entrance and self._stop.alone):
            return 0
        found = self._proof.reading()
        return found.alone if self._grid.width == 1 else found.together

    def _begin(self, source: BatchSource, *, trains: bool) -> bool:
        """Prepare a span; return whether there is a first batch, on which all ranks agree."""
        with self._together():
            return self._borders.begin(source, self.batches, self.schedule.stage_at[0, 0].rank, trains=trains)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A call that all ranks make before or after a span; without one of them nothing can go on any more."""
        try:
            yield
        except TransportError as error:
            self._broken = error
            raise

    def _executors(self, proof: Proof, channel: Channel = Channel.TRAINING) -> list[Executor]:
        ranks = {key.rank for key in self._grid.local}
        specs = stage_specs(proof.schedule, 0, ranks)
        combine = self._combine if channel is Channel.TRAINING and proof is self._proof else REDUCE
        lowered = self._transports.placed(proof.lowered)
        links = connect(self._grid, lowered, add_shares, channel, self._transports, self._holder_groups, combine)
        holders = holders_of(proof.schedule, self._grid.width)
        return [
            Executor(
                state,
                lowered,
                {spec.stage: spec for spec in specs if spec.stage.rank == state.key.rank},
                holders,
                links[state.key],
                combine,
            )
            for state in self._ranks
        ]

    def _drive(self, runs: list[Run], pipelines: int) -> Iterator[Report]:
        """Run the ranks; yield the reports of the last stage, where it is in this process, of so many pipelines."""
        if self._grid.group is not None:
            return self._kernels.during(drive_one(runs[0], self._timeout, self._polling))
        last = [pipeline * self._grid.depth + self._last for pipeline in range(pipelines)]
        return self._kernels.during(drive_all(runs, last))


def _reads_ahead(correction: Correction | None) -> bool:
    return correction is not None and CORRECTIONS[correction.name].reads_ahead
