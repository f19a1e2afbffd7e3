"""Callers of all ranks that wait for each other whenever they have a report, as for a metric of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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


def train_and_meet(group: dist.ProcessGroup, case: Case) -> Outcome:
    """Run a case; at every report, add up a number over all ranks."""
    recording, outcome = Recording(OPTIMIZERS[case.optimizer]), Outcome()
    pipeline = make_pipeline(case, group, optimizer=recording)
    for report in pipeline.run(make_batches(case)):
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
    ],
    ids=lambda case: f"{case.method}-{case.width}",
)
def test_callers_of_all_ranks_meet_at_every_report(pool: Pool, case: Case) -> None:
    """The last stage of parallel pipelines, and of two directions, reports a batch when its update is decided on."""
    assert_same(together(pool.submit(train_and_meet, case, ranks=4, timeout=40.0)), expected(case))
