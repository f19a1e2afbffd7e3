"""Lemma 2 of PipeMare (arXiv 1910.05124): the largest stable rates where backwards read newer weights than forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.options.passes import Staleness
from penstock.runtime.pipeline import Pipeline
from support.own_methods import correction_of, prove
from support.schedules import make_schedule

LATE, UPDATES = 10, 300
LIMITS = {  # updates that backwards are late, T2 or not: sensitivity -> largest stable rate, for a curvature of 1
    (0, False): {1: 0.059279, 3: 0.027072, 5: 0.017556, 10: 0.009348},
    (6, False): {1: 0.095699, 3: 0.054598, 5: 0.038067, 10: 0.021632},
    (0, True): {1: 0.131163, 3: 0.109981, 5: 0.097295, 10: 0.079145},
}


class Discrepant(torch.autograd.Function):
    """w, whose gradient is that of the loss less s w, with w as the backward reads it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, s: Tensor) -> Tensor:
        ctx.save_for_backward(w, s)
        return w.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        w, s = ctx.saved_tensors
        return gradient - s * w, None


class Weights(nn.Module):
    """One for each trial; whatever comes in."""

    def __init__(self, s: Tensor) -> None:
        super().__init__()
        self.w, self.s = nn.Parameter(torch.ones_like(s)), s

    def forward(self, _: Tensor) -> Tensor:
        return Discrepant.apply(self.w, self.s)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.long
@pytest.mark.parametrize(("backward", "corrected"), LIMITS, ids=str)
def test_the_limits_of_the_rate(backward: int, corrected: bool) -> None:
    """3 percent below it a trajectory shrinks, 3 percent above it grows: one weight of the pipeline for each."""
    limits = LIMITS[backward, corrected]
    s = torch.tensor([s for s in limits for _ in range(2)], dtype=torch.float64)
    rates = torch.tensor([limit * f for limit in limits.values() for f in (0.97, 1.03)], dtype=torch.float64)
    seen: list[Tensor] = []

    def descent(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=1.0)
        optimizer.register_step_post_hook(lambda *_: seen.extend(p.detach().abs().clone() for _, p in named))
        return optimizer

    common: dict[str, Any] = {
        "loss": lambda o, _: ((0.5 * rates * (1 + s) * o**2).sum(), 1.0),  # the rate of each is in its loss
        "optimizer": descent,
    }
    if corrected:
        blocks = [Weights(rates * s), *(lambda x: x * 1.0 for _ in range(LATE))]
        correction, balance = correction_of("pipemare", reschedule=0, decay=0.135), [1] * len(blocks)
        pipeline = Pipeline(blocks, prove("pipemare", LATE + 1, 1), staleness=correction, partition=balance, **common)
    else:
        schedule = make_schedule("sequential", 1, 1)
        pipeline = Pipeline(
            [Weights(rates * s)], schedule, staleness=Staleness(delays=LATE, backward_delays=backward), **common
        )
    x = torch.zeros_like(s)
    list(pipeline.run([[(x, x)]] * UPDATES))
    middle, end = (torch.stack(seen[at - 60 : at]).amax(0) for at in (UPDATES // 2, UPDATES))
    growth = (end / middle).tolist()
    assert all(below < 0.85 and above > 1.2 for below, above in zip(growth[::2], growth[1::2], strict=True)), growth
