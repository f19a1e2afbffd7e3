"""What people know from other libraries is met with what to write instead."""

from __future__ import annotations

import copy
import io
import pickle
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import Pipeline
from penstock.errors import ConfigError
from penstock.runtime.attribute_hints import ARGUMENTS, HABITS


def make_pipeline(**options: Any) -> Pipeline:
    return Pipeline(
        [nn.Linear(3, 4), nn.Linear(4, 2)],
        method="1f1b",
        stages=2,
        microbatches=2,
        loss=F.mse_loss,
        optimizer=torch.optim.AdamW,
        **options,
    )


def batches() -> list[Any]:
    return [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "leave the call out"),
        ("train_batch", r"for report in pipeline.run\(loader\)"),
        ("parameters", r"pipeline.full_state_dict\(\)"),
        ("cuda", r"Pipeline\(..., device='cuda'\) moves the blocks"),
        ("save_checkpoint", "penstock.Checkpoints"),
        ("optimizer", r"pipeline.optimizers\(\) has one per stage"),
        ("forward", r"pipeline.evaluate\(loader\)"),
        ("summary", r"penstock.summary\(pipeline\)"),
        ("batchs", "has no attribute 'batchs'. Did you mean 'batches'"),
        ("qqqq", "has no attribute 'qqqq'$"),
    ],
)
def test_names_of_other_libraries(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(make_pipeline(), name)


def test_no_habit_hides_an_attribute() -> None:
    pipeline = make_pipeline()
    assert {name for name in HABITS if hasattr(pipeline, name)} == set()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loss_fn", "takes no argument 'loss_fn'. Did you mean 'loss'?"),
        ("num_microbatches", "Did you mean 'microbatches'?"),
        ("scheduler", "Did you mean 'lr_scheduler'?"),
        ("optimiser", "takes no argument 'optimiser'. Did you mean 'optimizer'?"),
        ("device_map", "Did you mean 'device'?"),
        ("qqqq", "takes no argument 'qqqq'.$"),
        ("train_batch_size", "takes no argument 'train_batch_size'; a batch has as many samples as the loader puts"),
        ("zero_stage", "'zero_stage'; parallel pipelines divide their state: data_parallel=penstock.DataParallel"),
        ("in_flight", r"microbatches=penstock.Microbatches\(8, in_flight='auto'\)"),
        ("timeout", r"group=penstock.Group\(group, timeout=60.0\)"),
        ("waits", r"group=penstock.Group\(group, timeout=60.0\)"),
    ],
)
def test_arguments_of_other_libraries(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        make_pipeline(**{name: None})


def test_unknown_arguments_are_told_before_missing_ones() -> None:
    with pytest.raises(TypeError, match="takes no argument 'loss_fn'. Did you mean 'loss'?"):
        Pipeline([nn.Linear(3, 4)], method="1f1b", loss_fn=F.mse_loss)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes no argument 'model'. Did you mean 'blocks'?"):
        Pipeline(model=nn.Linear(3, 4))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'loss'"):
        Pipeline([nn.Linear(3, 4)], method="1f1b", optimizer=torch.optim.AdamW)  # type: ignore[call-arg]


def test_arguments_are_those_that_there_are() -> None:
    names = set(signature(Pipeline).parameters)
    assert set(ARGUMENTS.values()) <= names
    assert not names & set(ARGUMENTS)


def test_a_pipeline_is_not_called() -> None:
    with pytest.raises(TypeError, match=r"a Pipeline is not called. for report in pipeline.run\(loader\)"):
        make_pipeline()(torch.zeros(4, 3))


def test_a_pipeline_is_not_pickled() -> None:
    said = r"pipeline.full_state_dict\(\) on all ranks, then torch.save.*penstock.Checkpoints"
    for save in (pickle.dumps, copy.deepcopy, lambda pipeline: torch.save(pipeline, io.BytesIO())):
        with pytest.raises(TypeError, match=said):
            save(make_pipeline())


def test_what_is_not_there_yet_is_missing() -> None:
    with pytest.raises(AttributeError, match="has no attribute '_plan'"):
        Pipeline.__new__(Pipeline)._plan  # noqa: B018


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save": 100}, r"save must be a Saving, such as checkpoints.every\(100\).*got 100"),
        ({"save": penstock.Saving(0, print)}, "save: every must be a whole number"),
        ({"evaluate": batches()}, r"evaluate must be penstock.Evaluating\(every=50, data=loader\)"),
        ({"evaluate": penstock.Evaluating(2, iter(batches()))}, "data is a list_iterator, which the first evaluation"),
        ({"evaluate": penstock.Evaluating(0, batches())}, "evaluate: every must be a whole number"),
    ],
)
def test_plans_are_checked_when_run_is_called(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_pipeline().run(batches(), **options)


@pytest.mark.parametrize("saved", ["runs/mine", Path("runs/mine"), {"0.weight": torch.zeros(4, 3)}], ids=str)
def test_what_is_no_saved_state(saved: Any) -> None:
    with pytest.raises(ConfigError, match=r"to load a checkpoint: penstock.Checkpoints\(pipeline, folder\).load\(\)"):
        make_pipeline().load(saved)
