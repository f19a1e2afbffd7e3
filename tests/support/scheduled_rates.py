"""Small pipelines with torch's learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler as schedulers

from penstock import Pipeline, make_schedule

UPDATES, M, STAGES = 12, 2, 3
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=UPDATES + 2),
    "cosine": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=3),
    "steps": lambda o: schedulers.MultiStepLR(o, [2, 5, 6], gamma=0.3),
    "function": lambda o: schedulers.LambdaLR(o, lambda n: 1 / (1 + n)),
    "warm-up": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.02, step_size_up=2),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda named: SGD([p for _, p in named], lr=0.02, momentum=0.9),
    "adamw": lambda named: AdamW([p for _, p in named], lr=0.01),
}


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(STAGES)]


def make_batches() -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    return [[tuple(torch.randn(2, 3, 4, generator=generator)) for _ in range(M)] for _ in range(UPDATES)]  # type: ignore[misc]


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).sum(), target.numel()


def make_pipeline(method: str, optimizer: str, scheduler: str | None, **options: Any) -> Pipeline:
    return Pipeline(
        make_blocks(),
        make_schedule(method, STAGES, M),
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        lr_scheduler=None if scheduler is None else SCHEDULERS[scheduler],
        partition=[1] * STAGES,
        **options,
    )
