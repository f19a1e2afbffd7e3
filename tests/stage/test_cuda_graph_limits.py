"""What passes that are replayed would not do again, or would do on other memory: it is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.runtime.pipeline import Pipeline
from penstock.stage.loss import sum_and_weight
from support.recorder import CallsAgain, pairs, tiny


def losses(pipeline: Pipeline, batches: list[Any]) -> list[float | None]:
    return [report.loss for report in pipeline.run(batches)]


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """A mean over targets that count, of which there may be none."""
    counts = target != -100
    each = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (each * counts).sum() / counts.sum()


def test_a_microbatch_without_targets_adds_no_gradient(recorder: CallsAgain) -> None:
    """Not NaN, whatever the loss is divided by."""
    targets = [torch.tensor(batch) for batch in ([0, 1, 1, -100], [0, 1, -100, -100])]
    batches = [(x, targets[number % 2]) for number, (x, _) in enumerate(pairs(6))]
    with_graphs, without = (losses(tiny(None, graphs, loss=masked_mean), batches) for graphs in (True, False))
    assert with_graphs == without
    assert all(loss is not None and loss > 0 for loss in with_graphs)
    assert recorder.recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_weight_on_the_gpu_multiplies_as_a_number_does(dtype: torch.dtype) -> None:
    output, target = torch.rand(257, 2), torch.rand(257, 2)
    mean = torch.tensor(0.7, dtype=dtype)
    by_number, weight = sum_and_weight(mean, F.mse_loss, output, target, "here")
    by_tensor, _ = sum_and_weight(mean, F.mse_loss, output, target, "here", torch.tensor(weight, dtype=torch.float64))
    assert torch.equal(by_tensor, by_number)
