"""Sharded state that cannot be is refused by name, and so are step hooks, which would see rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import CapabilityError, ConfigError
from penstock.options.parallelism import DataParallel
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.build import prove
from penstock.schedule.methods.data_parallel_sync import Combine
from support.cases import Case, make_batches, make_pipeline
from support.pool import Pool


class MyOwn(torch.optim.SGD):
    """Nobody knows what it does."""


@pytest.mark.parametrize(
    ("case", "changes", "kind", "text"),
    [
        (Case("1f1b", 2, 2), {"sharding": "gradients"}, ConfigError, "but there is one; set data_parallel"),
        (Case("stash", 2, 2, width=2), {"sharding": "optimizer"}, ConfigError, "not with 'stash'.*set sharding to no"),
        (Case("1f1b", 2, 2, width=2), {"sharding": "rows"}, ConfigError, "unknown sharding 'rows'"),
        (
            Case("1f1b", 2, 2, width=2, reduce="fast"), {"sharding": "gradients"}, ConfigError,
            "adds gradients in the order of the pipelines; set reduce to ordered",
        ),
        (
            Case("1f1b", 2, 2, width=2), {"sharding": "optimizer", "combine": Combine("average", every=2)}, ConfigError,
            "divides one state among pipelines, which with combine=average have states of their own",
        ),
        (
            Case("chimera", 2, 2, width=2), {"sharding": "full"}, CapabilityError,
            "holds stages twice yet; take sharding gradients",
        ),
        (
            Case("2bw", 2, 2, "faint", "adafactor", width=2, tied=True), {"sharding": "gradients"}, CapabilityError,
            r"shares table\.weight with another stage, .*has to step whole parameters; take sharding=optimizer",
        ),
        (
            Case("1f1b", 2, 2, width=2), {"sharding": "gradients", "optimizer": MyOwn}, CapabilityError,
            "MyOwn may look at several parameters together.*or set sharding to none",
        ),
    ],
    ids=lambda c: c.method if isinstance(c, Case) else "",
)  # fmt: skip
def test_what_is_refused_by_name(case: Case, changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make_pipeline(case, **changes)


def test_in_16_bits_a_sum_may_not_come_before_the_update_that_the_one_before_waits_for() -> None:
    def make(method: str, precision: str) -> Pipeline:
        return Pipeline(
            [torch.nn.Linear(4, 4) for _ in range(4)],
            method,
            stages=2,
            microbatches=4,
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            precision=precision,
            data_parallel=DataParallel(2, sharding="gradients"),
        )

    with pytest.raises(CapabilityError, match="the gradients of the next batch before its update; take sharding full"):
        make("2bw-layered", "bf16")
    make("2bw-layered", "fp32")
    make("2bw", "bf16")


def test_a_schedule_that_has_another_sharding_than_the_options() -> None:
    blocks = {"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)}

    def make(schedule: str, option: str) -> Pipeline:
        return Pipeline(
            blocks,
            prove("1f1b", 2, 2, sharding=schedule),
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            data_parallel=DataParallel(2, sharding=option),
        )

    with pytest.raises(ConfigError, match="the schedule has sharding optimizer, but gradients is asked for"):
        make("optimizer", "gradients")
    for schedule, option in (("optimizer", "none"), ("gradients", "gradients"), ("none", "optimizer")):
        level = option if schedule == "none" else schedule
        assert make(schedule, option).schedule.sharding.level == level


@pytest.mark.parametrize(
    ("before", "after"), [("optimizer", "gradients"), ("gradients", "none"), ("none", "optimizer")]
)
def test_a_switch_to_another_sharding(before: str, after: str) -> None:
    """Stages hold what they were built for."""
    pipeline = make_pipeline(Case("1f1b", 2, 2, width=2), method=prove("1f1b", 2, 2, sharding=before))
    with pytest.raises(ConfigError, match=rf"they differ in sharding \({before} and {after}\)"):
        pipeline.switch(prove("2bw", 2, 2, sharding=after))


def test_step_hooks_would_see_rows() -> None:
    def hooked(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(CapabilityError, match="SGD has step hooks, which would see rows .* set sharding to none"):
        make_pipeline(Case("1f1b", 2, 2, width=2), sharding="optimizer", optimizer=hooked)


@pytest.mark.parametrize("level", ["optimizer", "full"])
def test_step_hooks_that_come_between_two_runs_would_see_rows_too(level: str) -> None:
    case = Case("1f1b", 2, 2, width=2, spans=(4,))
    pipeline, batches = make_pipeline(case, sharding=level), make_batches(case)
    list(pipeline.run(batches[:2]))
    optimizer = next(iter(pipeline.optimizers().values()))
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="AdamW has step hooks, which would see rows .* set sharding to none"):
        pipeline.run(batches[2:]).__next__()
    handle.remove()
    list(pipeline.run(batches[2:]))


def hooks_on_one(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    pipeline = make_pipeline(case, group, sharding="gradients")
    if dist.get_rank(group) == 1:
        for optimizer in pipeline.optimizers().values():
            optimizer.register_step_post_hook(lambda *_: None)
    try:
        list(pipeline.run(make_batches(case)))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_step_hooks_in_one_process_are_told_to_all(pool: Pool) -> None:
    said = pool.submit(hooks_on_one, Case("2bw", 1, 2, width=2, spans=(2,)), ranks=2, fresh=True)
    assert said[1][0] == "ConfigError"
    assert all("AdamW has step hooks, which would see rows of parameters only" in text for _, text in said)
