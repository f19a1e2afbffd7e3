"""Callers of all ranks that wait for each other whenever they have a report, as for a metric of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from penstock.runtime.execute.evaluation_without_draining import Evaluating
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    add_decisions,
    assert_same,
    expected,
    finish,
    make_batches,
    make_pipeline,
    together,
)
from support.pool import Pool


def train_and_meet(group: dist.ProcessGroup, case: Case, evaluates: bool = False) -> Outcome:
    """Run a case, with evaluations before each batch or without; at every report, add up a number over all ranks."""
    recording, outcome, batches = Recording(OPTIMIZERS[case.optimizer]), Outcome(), make_batches(case)
    pipeline = make_pipeline(case, group, optimizer=recording)
    for report in pipeline.run(batches, evaluate=Evaluating(1, lambda: batches[:4]) if evaluates else None):
        number = torch.tensor([float(report.batch)])
        dist.all_reduce(number, group=group)
        assert number == report.batch * group.size()
        outcome.reports.append((report.batch, report.loss, report.weight))
        add_decisions(outcome, case, report.decided)
    add_decisions(outcome, case, pipeline.decided())
    return finish(outcome, pipeline, recording)


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", 2, 4, width=2),
        Case("2bw", 2, 4, width=2, clip=0.5),
        Case("interleaved", 2, 4, width=2, options=(("chunks", 2),)),
        Case("dualpipe", 4, 8, clip=0.5),
        Case("2bw", 4, 4),
        Case("timeprest", 4, 4, clip=0.5),
        Case("timeprest", 4, 4, tied=True),
        Case("zb-h2-post", 2, 4, width=2, clip=0.1),
    ],
    ids=lambda case: f"{case.method}-{case.width}",
)
def test_callers_of_all_ranks_meet_at_every_report(pool: Pool, case: Case) -> None:
    """The last stage of parallel pipelines, and of two directions, reports a batch when its update is decided on.

    Under timeprest a rank has run all forwards of a batch before it joins the decision on the one before.
    """
    assert_same(together(pool.submit(train_and_meet, case, ranks=4, timeout=40.0)), expected(case))


@pytest.mark.parametrize("case", [Case("2bw", 2, 4, width=2), Case("1f1b", 4, 4)], ids=lambda case: case.method)
def test_callers_meet_while_evaluations_are_in_the_stream(pool: Pool, case: Case) -> None:
    """All ranks evaluate together before a batch: no report is before that on one rank, and behind it on another."""
    assert_same(together(pool.submit(train_and_meet, case, True, ranks=4, timeout=40.0)), expected(case))
