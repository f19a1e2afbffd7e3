"""The reference on the scalar pipelines that are computed by hand."""

from __future__ import annotations

from typing import Any

import torch

from support.own_methods import train_reference
from support.reference_cases import Times, half_square, inputs, of, sgd
from support.scalar_pipelines import LR, SKIPPED, rate


def nadam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(named, lr=LR, betas=(0.99, 0.999))


def begin(d: int) -> list[float]:
    return [0.8 + 0.1 * s for s in range(d)]


def referred(method: str, d: int, m: int, optimizer: Any = sgd, **more: Any) -> list[list[float]]:
    """Per stage, the weight of each version as the reference says."""
    batches = [[(of(x), of(float(t != SKIPPED))) for x in xs] for t, xs in enumerate(inputs(m))]
    stages = [{f"b{s}": Times(w)} for s, w in enumerate(begin(d))]
    result = train_reference(stages, half_square, batches, method=method, optimizer=optimizer, rate=rate, **more)
    return [[float(version[f"b{s}.w"]) for version in result.versions] for s in range(d)]
