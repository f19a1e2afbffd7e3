"""The engine: it runs a pipeline span by span, and keeps it consistent between spans.

A span is what lies between two drains. Training is one span per run where evaluations and snapshots fit between two
batches, and one span from each to the next where the pipeline must be drained for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from penstock.errors import ConfigError
from penstock.runtime.data.batch_source import Batches, Portions, batches_in
from penstock.runtime.engine.span_runner import Spans
from penstock.runtime.engine.span_setup import SpanSetup
from penstock.runtime.execute.evaluation_without_draining import Evaluating, readable
from penstock.runtime.rank.batch_reports import Report
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.rank.stage_snapshot import take_snapshot
from penstock.runtime.update.run_events import Evaluated, with_numbers
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.proof.proof import Proof
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.two_bw_ahead import prediction_of


class Halt(NamedTuple):
    """A moment of a run at which the pipeline is drained, for all ranks to do something together.

    Attributes:
        at: the batch before which that is.
        act: what they do; it may switch to another schedule.
    """

    at: int
    act: Callable[[], None]


class Engine:
    """Trains in spans, and changes what they run in between.

    Args:
        setup: makes what a span runs with.
        spans: runs them.

    Attributes:
        life: whether the pipeline is at rest.
    """

    def __init__(self, setup: SpanSetup, spans: Spans) -> None:
        self._setup, self._spans, self._ranks = setup, spans, setup.ranks
        self.life = spans.life
        self._data: Iterator[Any] | None = None  # of the current run, if it was an iterator
        self._stop = setup.ranks[0].stop

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

        Raises:
            PenstockError: another run, or a call between two runs, is in progress.
        """
        with self.life.exclusive():
            yield from self._train(batches, save, evaluate, halts)

    def _train(
        self, batches: Batches, save: Saving | None, evaluate: Evaluating | None, halts: Callable[[], Halt | None]
    ) -> Generator[Report]:
        if not torch.is_grad_enabled():
            raise ConfigError("training needs gradients, but run() was called under torch.no_grad()")
        self._stop.reset()
        self._spans.length = batches_in(batches)
        batches = self._with_unread(batches)
        halt = halts()
        if halt is not None and halt.at == self._spans.batches:  # the run before has ended where it would have halted
            with self.life.together():
                halt.act()
            halt = halts()
        if halt is None:
            yield from self._train_spans(batches, save, evaluate)
            return
        parts = Portions(batches)
        # A snapshot from there is taken afterwards, so that a run that resumes from it goes on alike.
        before = None if save is None else save._replace(make_room=lambda b: b != halt.at and save.make_room(b))
        left = yield from self._train_spans(parts.next(halt.at - self._spans.batches), before, evaluate)
        if left or self._spans.batches < halt.at:
            return
        with self.life.together():
            halt.act()
        if save is not None and save.wants(self._spans.batches) and save.make_room(self._spans.batches):
            for snapshot in self.snapshots():
                save.sink(snapshot)
        yield from self._train_spans(parts.next(), save, evaluate)

    def _with_unread(self, batches: Batches) -> Batches:
        """The data, after what an earlier run has read ahead of the same iterator, but not trained on."""
        unread = self._spans.unread if batches is self._data else []
        self._data, self._spans.unread = (batches if isinstance(batches, Iterator) else None), []
        return chain(unread, batches) if unread else batches

    def _train_spans(
        self, batches: Batches, save: Saving | None, evaluate: Evaluating | None
    ) -> Generator[Report, None, bool]:
        """Train in as many spans as snapshots and evaluations ask for; returns whether a rank has left."""
        self._evaluate_due(evaluate)
        ahead = evaluate is not None and self._setup.prediction is not None  # whose last versions are gone at the end
        if (save is None and evaluate is None) or (self._stays_full and not ahead):
            left = yield from self._spans.train(batches, save, evaluate)
            if not left:
                self._evaluate_due(evaluate)
            return left
        rest = iter(batches)
        while True:
            size = min(plan.every - self._spans.batches % plan.every for plan in (save, evaluate) if plan is not None)
            before = self._spans.batches
            left = yield from self._spans.train(islice(rest, size), None, None)
            if left or self._spans.batches - before < size:
                return left
            self._evaluate_due(evaluate)
            if save is not None and save.wants(self._spans.batches) and save.make_room(self._spans.batches):
                for snapshot in self.snapshots():
                    save.sink(snapshot)

    @property
    def _stays_full(self) -> bool:
        """Whether snapshots and evaluations fit between two batches."""
        return self._setup.proof.border_fault is None and not self._setup.combine.spec.drains

    def _evaluate_due(self, evaluate: Evaluating | None) -> None:
        """Evaluate the versions for which no border of a batch has been the place, with the pipeline drained.

        Those of the end of a run, when it ends; where it was left, or goes on from a snapshot, when a run begins.
        """
        spans = self._spans
        older = spans.older if self._stays_full and self._setup.prediction is None else 0
        for version in range(max(spans.evaluated + 1, spans.batches - older), spans.batches + 1):
            if evaluate is not None and evaluate.wants(version):
                found = spans.evaluate(readable(evaluate), averaged=False, version=version)
                for state in self._ranks:
                    state.decisions.events.evaluated_everywhere(
                        with_numbers(Evaluated(version, *found[:2]), found.numbers)
                    )
        spans.evaluated = spans.batches

    def snapshots(self) -> list[Snapshot]:
        """Take a snapshot of every stage in this process, with the pipeline drained."""
        found = []
        for state in self._ranks:
            for stage in state.stages.values():
                stage.refresh()
                found.append(take_snapshot(stage, self._spans.batches, state.decisions))
        return found

    def switch(self, proof: Proof, correction: Correction | None) -> None:
        """Continue under another schedule with the same stages, with the pipeline drained.

        Args:
            proof: of the schedule.
            correction: of its method.
        """
        delay = RULES[proof.schedule.rule].delay
        same = prediction_of(correction, delay) == self._setup.prediction  # else older versions are another thing
        kept = self._spans.older = min(self._spans.older, delay) if same else 0
        self._setup.switch(proof, correction)
        try:
            for state in self._ranks:
                state.switch(proof, kept, correction)
        except BaseException as error:
            self.life.broken = error  # some stages may have been switched
            raise

    def widen(self, proof: Proof) -> None:
        """Continue under the same schedule with another window, of which stages know nothing."""
        self._setup.proof = proof
