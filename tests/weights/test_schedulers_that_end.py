"""A learning-rate scheduler that ends before the run does ends it on all ranks, before the next batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedulers

from penstock import Pipeline, make_schedule
from penstock.errors import ConfigError, PenstockError
from penstock.options.run import Group
from penstock.weights.updates.lr_scheduler_table import ScheduledSettings
from support.cases import assert_equal_tensors
from support.pool import Pool
from support.scheduled_rates import OPTIMIZERS, STAGES, M, loss, make_batches, make_blocks


def ending(
    group: dist.ProcessGroup | None, method: str, width: int = 1, blocks: list[nn.Module] | None = None
) -> Pipeline:
    """With a scheduler for five updates: OneCycleLR has a rate for after its last step, too."""
    return Pipeline(
        blocks or make_blocks(),
        make_schedule(method, STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        lr_scheduler=lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=4),
        data_parallel=width,
        group=Group(group, 20.0),
    )


def run_to_the_end(group: dist.ProcessGroup, method: str) -> tuple[list[int], str, int]:
    pipeline, reports, said = ending(group, method), [], ""
    try:
        for report in pipeline.run(make_batches()[:7]):
            reports.append(report.batch)
    except ConfigError as error:
        said = str(error)
    pipeline.full_state_dict()
    return reports, said, pipeline.batches


@pytest.mark.processes
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_scheduler_that_ends_ends_the_run_on_all_ranks(method: str, pool: Pool) -> None:
    """The rank that reads furthest ahead notices; all raise it, or the others would go on to calls of their own."""
    found = pool.submit(run_to_the_end, method, ranks=STAGES)
    said = found[0][1]
    assert said.startswith("lr_scheduler has no rate for update 6: Tried to step 5 times.")
    assert said.endswith("such as total_steps=epochs * len(loader)")
    assert found == [([0, 1, 2, 3, 4], said, 5)] * STAGES


def end_with_a_frozen_front(group: dist.ProcessGroup, method: str, frozen: int) -> tuple[list[int], str, int, str]:
    """What is reported in two runs, and what the second one says, which needs more rates than there are; one more."""
    blocks = make_blocks()
    for block in blocks[:frozen]:
        block.requires_grad_(False)
    pipeline, reports, said = ending(group, method, blocks=blocks), [], []
    for batches in (make_batches()[:2], make_batches()[2:7], make_batches()[:1]):
        try:
            for report in pipeline.run(batches):
                reports.append(report.batch)
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    return reports, said[0] if len(said) > 1 else "", pipeline.batches, said[-1]


@pytest.mark.processes
@pytest.mark.parametrize(("method", "frozen"), [("1f1b", 2), ("2bw", 1)])
def test_a_scheduler_that_ends_behind_a_first_stage_that_is_frozen(pool: Pool, method: str, frozen: int) -> None:
    """The rank of a later stage, which reads ahead, notices."""
    why = "NoRateError: lr_scheduler has no rate for update 6: Tried to step 5 times. "
    for reports, said, batches, last in pool.submit(
        end_with_a_frozen_front, method, frozen, ranks=STAGES, timeout=20.0
    ):
        assert (reports, said, batches) == ([0, 1, 2, 3, 4], last, 5)
        assert last.startswith(why)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_scheduler_that_ends_ends_the_run_before_the_next_batch(method: str, width: int) -> None:
    """All batches before have been trained on and reported, and the pipeline is as good as after any run."""
    batches = [a + b for a, b in pairwise(make_batches())] if width == 2 else make_batches()
    pipeline, wanted = (ending(None, method, width) for _ in range(2))
    reports = []
    with pytest.raises(ConfigError, match=r"lr_scheduler has no rate for update 6: .*as many steps as"):  # noqa: PT012
        for report in pipeline.run(batches[:7]):
            reports.append(report.batch)
    assert reports == [0, 1, 2, 3, 4]
    list(wanted.run(batches[:5]))
    assert_equal_tensors(pipeline.state_dict(), wanted.state_dict(), "weights")
    assert pipeline.batches == 5
    pipeline.snapshots()
    assert pipeline.evaluate(batches[:1]) is not None
    with pytest.raises(ConfigError, match="no rate for update 6"):
        list(pipeline.run(batches[:1]))
    assert list(pipeline.run([])) == []


def test_rates_beyond_the_end_of_a_scheduler_are_its_last_ones() -> None:
    """Predictions look further than training goes."""
    optimizer = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    table = ScheduledSettings(lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=4), optimizer)
    assert table.near(9) == table.near(4)
    assert table.at(2)[0]["lr"] > table.near(9)[0]["lr"]
    with pytest.raises(ValueError, match="Tried to step 5 times"):
        table.at(9)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_scheduler_that_ends_too_early_says_so(method: str) -> None:
    pipeline = Pipeline(
        make_blocks(),
        make_schedule(method, STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        lr_scheduler=lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=4),
    )
    with pytest.raises(ConfigError, match="has no rate for update 6: Tried to step 5 times.*total_steps=epochs"):
        list(pipeline.run(make_batches()))
