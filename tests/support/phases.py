"""One run under several methods, one after the other, and the reference of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime.pipeline import Pipeline
from penstock.schedule.ir.schedule import Schedule
from penstock.verify.reference import Scaling, run
from penstock.verify.reference.predictions import ReferencePrediction
from penstock.verify.reference.stage import ReferenceReading, step
from penstock.verify.reference.supported_methods import UPDATES_LATE, method_options
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    add_decisions,
    expected,
    finish,
    make_batches,
    make_pipeline,
)
from support.own_methods import correction_of
from support.schedules import make_schedule

Phases = Sequence[tuple[str, int]]  # method, batches
OPTIONS = {"pipemare": {"reschedule": 12}}
RESTLESS = Scaling(2.0**4, 2.0, 0.5, 2)


def case_of(phases: Phases, depth: int, m: int, **more: Any) -> Case:
    return Case(phases[0][0], depth, m, spans=tuple(count for _, count in phases), **({"skips": ()} | more))


def schedule(case: Case, method: str, **more: Any) -> Schedule:
    return make_schedule(method, case.depth, case.m, **more)


def train_phases(group: dist.ProcessGroup | None, case: Case, phases: Phases) -> Outcome:
    """Run a case with the pipeline, under one method after the other."""
    recording = Recording(OPTIMIZERS[case.optimizer])
    pipeline, outcome, batches = make_pipeline(case, group, optimizer=recording), Outcome(), make_batches(case)
    for (method, _), (first, end) in zip(phases, pairwise((0, *accumulate(case.spans))), strict=True):
        if first:
            pipeline.switch(schedule(case, method), correction=correction_of(method, **OPTIONS.get(method, {})))
        run_on(pipeline, case, outcome, batches[first:end])
    return finish(outcome, pipeline, recording)


def run_on(pipeline: Pipeline, case: Case, outcome: Outcome, batches: Sequence[Any]) -> None:
    for r in pipeline.run(batches):
        outcome.reports.append((r.batch, r.loss, r.weight))
        add_decisions(outcome, case, r.decided)
    add_decisions(outcome, case, pipeline.decided())


def expected_of(case: Case, phases: Phases, patch: pytest.MonkeyPatch) -> Outcome:
    """The reference, which is told before every batch by whose equations it goes on.

    With a constant delay k batch t reads W(t-k), but the first k + 1 after another rule at most what that has left.
    """
    starts = dict(zip((0, *accumulate(count for _, count in phases)), (method for method, _ in phases), strict=False))
    train, version = run.Run.train, run.version_read
    since = 0

    def train_one(self: Any, t: int, batch: Any) -> None:
        nonlocal since
        if t in starts:
            since = max(since, t - min(UPDATES_LATE.get(method, 0) for method in (starts[t], self.method)))
            self.method, self.options = starts[t], method_options(starts[t], OPTIONS.get(starts[t], {}))
            for stage in self.stages:
                stage.reading, stage.step, stage.made = (
                    ReferenceReading(),
                    step,
                    False,
                )  # what was known of motion is forgotten
            self.begin(len(batch))
            for stage in self.stages:
                if isinstance(stage.reading, ReferencePrediction):  # it counts versions from its first one on
                    stage.reading.ahead[:0] = [{}] * t
        train(self, t, batch)

    def version_of(method: str, t: int, *where: Any) -> int:
        return max(t - UPDATES_LATE[method], since) if method in UPDATES_LATE else version(method, t, *where)

    with patch.context() as planted:
        planted.setattr(run.Run, "train", train_one)
        planted.setattr(run, "version_read", version_of)
        return expected(case)
