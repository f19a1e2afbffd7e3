"""Settings of optimizers that are set by hand between runs: kept, told to all ranks, or refused."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.optim import lr_scheduler as schedulers

import penstock
from penstock import Pipeline, make_schedule
from penstock.errors import CheckpointError, ConfigError, PenstockError
from penstock.options.run import Group
from support.cases import assert_equal_tensors
from support.pool import Pool
from support.scheduled_rates import OPTIMIZERS, STAGES, M, loss, make_batches, make_blocks, make_pipeline
from support.snapshots import Kept


def test_rates_set_between_two_runs_are_kept() -> None:
    """As they are, and as what a correction multiplies."""
    for method in ("1f1b", penstock.method("pipemare", reschedule=10)):
        pipeline = Pipeline(
            make_blocks(), method=method, stages=STAGES, microbatches=1, loss=loss, optimizer=OPTIMIZERS["sgd"]
        )
        batches = [batch[:1] for batch in make_batches()]
        list(pipeline.run(batches[:1]))
        for optimizer in pipeline.optimizers().values():
            optimizer.param_groups[0]["lr"] = 0.5
        list(pipeline.run(batches[1:2]))
        found = [optimizer.param_groups[0]["lr"] for optimizer in pipeline.optimizers().values()]
        correctors = [stage.weights.corrector for stage in pipeline.stages.values()]  # type: ignore[attr-defined]
        assert found == [0.5 * (1.0 if corrector is None else corrector.rate(1)) for corrector in correctors]
        assert (found[0] == 0.5) == (method == "1f1b")


def test_between_two_runs_a_scheduler_may_be_stepped_by_hand() -> None:
    """Also one that needs a metric."""
    pipeline = make_pipeline("2bw", "sgd", None)
    plans = [schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0) for o in pipeline.optimizers().values()]
    for _ in range(3):
        list(pipeline.run(make_batches()[:2]))
        for plan in plans:
            plan.step(1.0)
    assert [o.param_groups[0]["lr"] for o in pipeline.optimizers().values()] == [0.005] * STAGES


def train_by_epochs(group: dist.ProcessGroup | None, method: str, stages: int, width: int) -> dict[str, Tensor]:
    """Three runs, between which a scheduler is stepped and momentum is set by hand."""
    pipeline = Pipeline(
        make_blocks()[:2],
        make_schedule(method, stages, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        data_parallel=width,
        group=Group(group, 20.0),
    )
    plans = [schedulers.StepLR(o, 1, gamma=0.5) for o in pipeline.optimizers().values()]
    batches = [a + b for a, b in pairwise(make_batches())] if width == 2 else make_batches()
    for epoch in range(3):
        list(pipeline.run(batches[2 * epoch : 2 * epoch + 2]))
        for plan in plans:
            plan.step()
        for optimizer in pipeline.optimizers().values():
            optimizer.param_groups[0]["momentum"] = 0.5 / (1 + epoch)
    every = [stage.weights.updater.optimizer for state in pipeline._ranks for stage in state.stages.values()]  # type: ignore[attr-defined]
    list(pipeline.run(batches[6:7]))
    assert {o.param_groups[0]["lr"] for o in every} == {0.0025}
    return pipeline.state_dict()


@pytest.mark.processes
def test_settings_by_hand_reach_parallel_pipelines(pool: Pool) -> None:
    """In one process, too, which shows the optimizers of the first one only."""
    alone = train_by_epochs(None, "2bw", 1, 2)
    for found in pool.submit(train_by_epochs, "2bw", 1, 2, ranks=2):
        assert_equal_tensors(found, alone, "weights")


def set_on_some(group: dist.ProcessGroup, stages: int, width: int, who: list[int]) -> tuple[list[str], list[Any]]:
    """What runs say, and the rates that they use: set on some ranks only, then on all, then nothing again."""
    pipeline = Pipeline(
        make_blocks()[: 2 * stages],
        make_schedule("1f1b", stages, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        data_parallel=width,
        group=Group(group, 20.0),
    )
    batches = [a + b for a, b in pairwise(make_batches())] if width == 2 else make_batches()
    said, rates = [], []
    log = logging.getLogger("penstock")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        for ranks in (who, who, [0, 1], []):
            if dist.get_rank(group) in ranks:
                for optimizer in pipeline.optimizers().values():
                    optimizer.param_groups[0]["lr"] = 0.0025
            try:
                list(pipeline.run(batches[:1]))
            except ConfigError as error:
                said.append(str(error))
            rates.append([o.param_groups[0]["lr"] for o in pipeline.optimizers().values()])
    finally:
        log.removeHandler(handler)
    return said, rates


@pytest.mark.processes
def test_other_settings_of_the_same_weights_are_refused(pool: Pool) -> None:
    """On all ranks, before anything is trained; and the pipelines go on once they are equal."""
    for said, rates in pool.submit(set_on_some, 1, 2, [1], ranks=2):
        reason = (
            "stage 0 is stepped with other settings on ranks 0 and 1, which hold the same weights: nothing and "
            "lr=0.0025 were set by hand; set the same on all ranks"
        )
        assert [text[: len(reason)] for text in said] == [reason] * 2
        assert rates[2:] == [[0.0025]] * 2


@pytest.mark.processes
def test_a_rate_that_is_set_on_some_stages_only_is_warned_of(pool: Pool) -> None:
    """Once; it may be meant."""
    for said, rates in pool.submit(set_on_some, 2, 1, [1], ranks=2):
        assert said == [
            "learning rates were set by hand on ranks 1, not on ranks 0; if that is not meant, set them on all ranks"
        ]
        assert rates[2:] == [[0.0025]] * 2


def overwritten_on_one(group: dist.ProcessGroup) -> list[str]:
    pipeline = Pipeline(
        make_blocks(),
        make_schedule("1f1b", STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS["sgd"],
        lr_scheduler=lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
        group=Group(group, 20.0),
    )
    if dist.get_rank(group) == 1:
        for optimizer in pipeline.optimizers().values():
            optimizer.param_groups[0]["lr"] = 0.5
    said = []
    for _ in range(2):
        with pytest.raises(PenstockError) as caught:
            list(pipeline.run(make_batches()[:2]))
        said.append(f"{caught.type.__name__}: {caught.value}")
    return said


@pytest.mark.processes
def test_a_rate_that_a_scheduler_would_overwrite_on_one_rank_is_refused_on_all(pool: Pool) -> None:
    one, two, *_ = pool.submit(overwritten_on_one, ranks=STAGES, timeout=20.0)
    assert all("ConfigError: the learning rate of SGD was set to 0.5 by hand, but lr_scheduler sets" in s for s in two)
    assert all(s.startswith("DataError: rank 1 could not begin (ConfigError: the learning rate of SGD") for s in one)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_has_the_settings_that_were_set_by_hand(optimizer: str, tmp_path: Path) -> None:
    """Also in other stages, and also if they were set after the last update; the user's schedulers are the user's."""

    def begin(stages: int = STAGES) -> tuple[Pipeline, penstock.Checkpoints]:
        pipeline = Pipeline(
            make_blocks(), method="2bw", stages=stages, microbatches=M, loss=loss, optimizer=OPTIMIZERS[optimizer]
        )
        return pipeline, penstock.Checkpoints(pipeline, tmp_path)

    whole, checkpoints = begin()
    plans = [schedulers.ExponentialLR(o, 0.1) for o in whole.optimizers().values()]
    list(whole.run(make_batches()[:3]))
    for plan, made in zip(plans, whole.optimizers().values(), strict=True):
        plan.step()
        made.param_groups[0] |= {"betas": (0.3, 0.4)} if optimizer == "adamw" else {"momentum": 0.3}
    checkpoints.save()
    list(whole.run(make_batches()[3:6]))
    for stages in (STAGES, 2):
        resumed, found = begin(stages)
        found.load()
        list(resumed.run(make_batches()[3:6]))
        assert_equal_tensors(resumed.state_dict(), whole.state_dict(), "weights")
        for made in resumed.optimizers().values():
            assert made.param_groups[0] | {"params": [], "param_names": []} == {
                **next(iter(whole.optimizers().values())).param_groups[0],
                "params": [],
                "param_names": [],
            }


def test_a_checkpoint_without_settings_by_hand_gives_those_of_the_factory() -> None:
    saved = make_pipeline("1f1b", "sgd", None)
    list(saved.run(make_batches()[:1]))
    other = make_pipeline("1f1b", "sgd", None)
    for made in other.optimizers().values():
        made.param_groups[0]["lr"] = 7.0
    other.load(Kept(saved.snapshots()))
    assert {made.param_groups[0]["lr"] for made in other.optimizers().values()} == {0.02}


def test_settings_of_two_groups_do_not_go_into_one() -> None:
    saved = make_pipeline("1f1b", "sgd", None)
    [*_, last] = saved.optimizers().values()
    last.param_groups[0]["lr"] = 7.0
    kept = Kept(saved.snapshots())
    other = Pipeline(make_blocks(), method="1f1b", stages=1, microbatches=M, loss=loss, optimizer=OPTIMIZERS["sgd"])
    with pytest.raises(CheckpointError, match=r"0.0.weight and 2.0.weight are in one parameter group, but .*'lr': 7.0"):
        other.load(kept)


def test_a_switch_keeps_what_was_set_by_hand() -> None:
    pipeline = make_pipeline("1f1b", "sgd", None)
    for made in pipeline.optimizers().values():
        made.param_groups[0]["lr"] = 0.5
    pipeline.switch("2bw")
    assert {made.param_groups[0]["lr"] for made in pipeline.optimizers().values()} == {0.5}


def test_a_rate_set_by_hand_that_a_scheduler_would_overwrite_is_refused() -> None:
    pipeline = make_pipeline("1f1b", "sgd", "steps")
    list(pipeline.run(make_batches()[:2]))
    next(iter(pipeline.optimizers().values())).param_groups[0]["lr"] = 0.5
    with pytest.raises(ConfigError, match="set to 0.5 by hand, but lr_scheduler sets it"):
        list(pipeline.run(make_batches()[2:4]))
