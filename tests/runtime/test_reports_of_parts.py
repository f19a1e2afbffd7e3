"""Where each pipeline, or direction, has a part of a batch, reports are of the whole batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Combine, DataParallel, Pipeline
from support.pool import Pool

BATCHES = 5


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over the targets that count, and their number, which differs between the parts of a batch."""
    counts = target > 0
    return ((output - target).square() * counts).sum(), counts.sum()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(16, 3, generator=generator),
            torch.randn(16, 2, generator=generator) + torch.arange(16)[:, None] / 9,
        )
        for _ in range(BATCHES)
    ]


def reports_of(method: str, group: dist.ProcessGroup | None = None, m: int = 4, **options: Any) -> tuple[Any, Any]:
    """Losses and weights of all batches, as reports and as decisions have them."""
    torch.manual_seed(1)
    pipeline = Pipeline(
        [nn.Linear(a, b) for a, b in itertools.pairwise((3, 5, 5, 5, 2))],
        method,
        stages=2,
        microbatches=m,
        loss=summed,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        group=group,
        **options,
    )
    reports, decided = [], []
    for report in pipeline.run(make_batches()):
        assert report.batch == len(reports)
        reports.append((report.loss, report.weight))
        decided += report.decided
    decided += pipeline.decided()
    return reports, [(decision.loss, decision.weight) for decision in decided]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("1f1b", {"data_parallel": 2}),
        ("2bw", {"data_parallel": 3}),
        ("interleaved", {"data_parallel": 2}),
        ("zb-h2-post", {"data_parallel": 2, "max_grad_norm": 0.5}),
        ("1f1b", {"data_parallel": DataParallel(2, sharding="gradients")}),
        ("chimera", {"max_grad_norm": 100.0}),
    ],
)
def test_the_loss_of_a_report_is_that_of_the_whole_batch(method: str, options: dict[str, Any]) -> None:
    reports, decided = reports_of(method, **options)
    assert reports == decided
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise((3, 5, 5, 5, 2))))
    with torch.no_grad():
        total, weight = summed(model(make_batches()[0][0]), make_batches()[0][1])
    assert reports[0] == (pytest.approx(float(total / weight), rel=1e-5), float(weight))


def test_pipelines_that_average_report_their_own_part() -> None:
    combine = DataParallel(2, combine=Combine("average", every=2))
    reports, _ = reports_of("1f1b", data_parallel=combine, max_grad_norm=100.0)
    weights = [float(summed(target[:8], target[:8])[1]) for _, target in make_batches()]
    assert [weight for _, weight in reports] == weights


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_all_processes_of_the_last_stage_report_it(pool: Pool, method: str) -> None:
    found = pool.submit(reported_in_a_process, method, ranks=4)
    wanted, _ = reports_of(method, data_parallel=2)
    nothing = [(None, None)] * BATCHES
    assert found == [nothing, wanted, nothing, wanted]


def reported_in_a_process(group: dist.ProcessGroup, method: str) -> Any:
    return reports_of(method, group, data_parallel=2)[0]
