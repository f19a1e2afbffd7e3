"""Scalar models, optimizers and comparisons that the tests of the references share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import scalar_pipelines as by_hand
from support.scalar_pipelines import BETAS, DECAY, LR, MOMENTUM

BATCHES = 25


class Times(nn.Module):
    """w x, with one weight."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def of(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def half_square(output: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    """Of the distance from 1; the target is the weight of the microbatch."""
    return weight * (output - 1.0) ** 2 / 2, float(weight)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=LR, betas=BETAS, weight_decay=DECAY)


def inputs(m: int) -> list[list[float]]:
    return [[0.7 + 0.2 * math.sin(3 * (t * m + k)) for k in range(m)] for t in range(BATCHES)]


def assert_equal(found: list[list[float]], wanted: list[list[float]]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    assert len({round(w, 6) for w in wanted[0]}) >= BATCHES - 1  # something is learned all the time


PIPEMARE = {"reschedule": by_hand.PipeMare.K}
