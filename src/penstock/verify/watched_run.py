"""The run of a pipeline whose every number is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.pipeline import Pipeline
from penstock.schedule.ir.version_rules import RULES
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import Prepared
from penstock.train.setup.optimizers import optimizer_factory
from penstock.verify.baseline_runs import data_of, decides
from penstock.verify.differences import Value
from penstock.verify.optimizer_recorder import WatchedFactory
from penstock.weights.decision import Decision

See = Callable[[str, int, str, Value, int], None]
"""Called with the kind of a number, its batch, its name, its value and the pipeline."""


class WatchedRun:
    """Trains the pipeline and shows its numbers as they arrive.

    Args:
        prepared: the run.
        count: the number of batches.
        updated: the batches whose update must be made.
        see: receives the numbers.
        group: one process per rank, each of which shows what it has; None for all ranks in this process.
    """

    def __init__(
        self, prepared: Prepared, count: int, updated: list[int], see: See, group: dist.ProcessGroup | None = None
    ) -> None:
        self._config, self._count, self._updated, self._see = prepared.config, count, updated, see
        self._decides, self._alone = decides(prepared), group is None
        self._data = data_of(prepared, count)
        provisional = RULES[prepared.plan.schedule.rule].provisional
        self._watch = WatchedFactory(optimizer_factory(self._config.optimizer), self._update, waits=provisional)
        self.pipeline: Pipeline = make_pipeline(prepared, group, self._watch)

    def run(self) -> Exception | None:
        """Train; returns what was raised on the way."""
        try:
            for report in self.pipeline.run(self._data):
                self._loss(report.batch, report.loss, report.weight)
                self._decisions(report.decided)
            self._decisions(self.pipeline.decided())
        except Exception as error:  # any error is a finding about the pipeline
            return error
        for name, value in self.pipeline.state_dict().items():
            self._see("final state", self._count, name, value, 0)
        for name, state, place in self._watch.states():
            self._see("optimizer state", self._count, name, state, place)
        return None

    def _update(self, kind: str, number: int, name: str, tensor: Tensor, pipeline: int) -> None:
        if number < len(self._updated):
            self._see(kind, self._updated[number], name, tensor, pipeline)
        else:
            self._see(kind, self._count - 1, f"{name} in an update too many", tensor, pipeline)

    def _loss(self, batch: int, loss: float | None, weight: float | None) -> None:
        for name, value in (("loss", loss), ("loss weight", weight)):
            if self._alone or value is not None:  # else another process knows it
                self._see("losses", batch, name, math.nan if value is None else value, 0)

    def _decisions(self, decided: Iterable[Decision]) -> None:
        for d in decided:
            if self._decides:
                for name, value in (("norm", d.norm), ("loss scale", d.scale), ("skipped", float(d.skipped))):
                    self._see("decisions", d.batch, name, value, 0)
