"""What is said where a script is written as for another library, or with arguments in another place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import ConfigError


def make_pipeline(*schedule: Any, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    given = {"method": "1f1b", "stages": 2, "microbatches": 2} if not schedule else {}
    others = {"loss": F.mse_loss, "optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)}
    return penstock.Pipeline([nn.Linear(3, 4), nn.Linear(4, 2)], *schedule, **{**given, **others, **options})


BATCHES = [(torch.zeros(4, 3), torch.zeros(4, 2))]


def test_arguments_in_another_order(tmp_path: Path) -> None:
    pipeline = make_pipeline()
    with pytest.raises(ConfigError, match=r"the number of batches comes first: penstock.Evaluating\(50, loader\)"):
        pipeline.run(BATCHES, evaluate=penstock.Evaluating(BATCHES, 50))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the pipeline comes first: penstock.Checkpoints\(pipeline, '.*mine'\)"):
        penstock.Checkpoints(tmp_path / "mine", pipeline)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Checkpoints takes the pipeline, not a Linear"):
        penstock.Checkpoints(nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the blocks and the method by position; give the others by name: "):
        make_pipeline("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("epochs", r"for epoch in range\(2\): for report in pipeline.run\(loader\)"),
        ("num_epochs", "for epoch in range"),
        ("max_steps", "itertools.islice"),
        ("validation_loader", r"evaluate=penstock.Evaluating\(50, validation_loader\)"),
        ("checkpoint", r"save=checkpoints.every\(100\)"),
        ("evaluat", "Did you mean 'evaluate'"),
    ],
)
def test_arguments_of_run_of_other_libraries(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=rf"run has no argument '{name}'.*{said}"):
        make_pipeline().run(BATCHES, **{name: 2})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("epochs", r"for report in pipeline.run\(loader\)"),
        ("dataloader", r"pipeline.run\(loader\)"),
        ("train_loader", r"pipeline.run\(loader\)"),
        ("batch_size", "microbatches"),
        ("lr", "optimizer=lambda named"),
        ("num_stages", "Did you mean 'stages'"),
    ],
)
def test_arguments_of_a_pipeline_of_other_libraries(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=said) as refused:
        make_pipeline(**{name: 2})
    assert "'blocks'" not in str(refused.value)
    assert "'data_parallel'" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Schedule1F1B", 'penstock.make_schedule("1f1b", stages, microbatches)'),
        ("ScheduleGPipe", 'penstock.make_schedule("gpipe", stages, microbatches)'),
        ("ScheduleInterleaved1F1B", 'penstock.make_schedule("interleaved", stages, microbatches)'),
        ("ScheduleZBVZeroBubble", 'penstock.make_schedule("zb-v", stages, microbatches)'),
        ("PipelineStage", 'penstock.Pipeline(blocks, method="1f1b", stages=2'),
        ("Accelerator", 'penstock.Pipeline(blocks, method="1f1b", stages=2'),
        ("PipelineModule", 'penstock.Pipeline(blocks, method="1f1b", stages=2'),
        ("initialize", 'penstock.Pipeline(blocks, method="1f1b", stages=2'),
    ],
)
def test_public_names_of_other_libraries(name: str, said: str) -> None:
    with pytest.raises(AttributeError) as refused:
        getattr(penstock, name)
    assert f"penstock has no {name}: " in str(refused.value)
    assert said in str(refused.value)
    assert not hasattr(penstock, "__path_of_nothing__")


def test_batches_of_1f1b_first_are_no_option_of_a_method() -> None:
    with pytest.raises(ConfigError, match=r"sync is for comparisons .* --set sync.batches=10; .*pipeline.switch"):
        make_pipeline("2bw:sync=10", stages=2, microbatches=2)
