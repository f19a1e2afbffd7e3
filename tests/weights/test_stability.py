"""At which rates delayed descent on a quadratic is stable: the pipeline against the equations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.options.passes import Staleness
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.build import make_schedule
from support.cases import Named


class Scalar(nn.Module):
    """Adds its weight's half square to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w**2 / 2


class Trial(NamedTuple):
    """Of one block: its delay in updates, rate and momentum."""

    tau: int
    rate: float
    momentum: float = 0.0

    def weights(self, steps: int) -> list[float]:
        """v <- momentum v + w(t - tau); w(t + 1) = w(t) - rate v."""
        w, v = [1.0], 0.0
        for t in range(steps):
            v = self.momentum * v + w[max(t - self.tau, 0)]
            w.append(w[t] - self.rate * v)
        return w


def descend(trials: Mapping[str, Trial], method: str, depth: int, m: int, steps: int) -> dict[str, list[float]]:
    """The weights of every block, after every update of a pipeline; `1f1b` with delays of choice."""
    found: dict[str, list[float]] = {name: [1.0] for name in trials}

    def descent(named: Named) -> torch.optim.Optimizer:
        own = [(name.removesuffix(".w"), p) for name, p in named]
        groups = [{"params": [p], "lr": trials[name].rate, "momentum": trials[name].momentum} for name, p in own]
        optimizer = torch.optim.SGD(groups)
        optimizer.register_step_post_hook(lambda *_: [found[name].append(float(p.detach())) for name, p in own])
        return optimizer

    pipeline = Pipeline(
        {name: Scalar() for name in trials},
        make_schedule(method, depth, m),
        loss=lambda output, _: output,
        optimizer=descent,
        staleness=Staleness(delays={name: trial.tau for name, trial in trials.items()} if method == "1f1b" else None),
        partition=[len(trials) // depth] * depth,
    )
    start = torch.zeros((), dtype=torch.float64)
    list(pipeline.run([(start, start)] * m for _ in range(steps)))
    return found


def check(trials: Mapping[str, Trial], found: Mapping[str, list[float]], steps: int) -> None:
    for name, trial in trials.items():
        assert found[name] == pytest.approx(trial.weights(steps), rel=1e-6, abs=1e-9), name
        last = max(map(abs, found[name][-20:]))
        assert last > 10 if name.startswith(("above", "un")) else last < 0.1, name


@pytest.mark.parametrize("depth", [1, 2])
def test_the_stability_limit_of_delayed_descent(depth: int) -> None:
    """PipeMare (arXiv 1910.05124), lemma 1: of w^2 / 2 with delay tau rates up to 2 sin(pi / (4 tau + 2)) are stable.

    Every block has a weight, a delay and a rate of its own: just below the limit, just above, and 0.2 for two delays.
    """
    trials: dict[str, Trial] = {}
    for tau in (0, 1, 2, 5, 10):
        limit = 2 * math.sin(math.pi / (4 * tau + 2))
        trials |= {f"below {tau}": Trial(tau, 0.95 * limit), f"above {tau}": Trial(tau, 1.05 * limit)}
    trials |= {"stable": Trial(5, 0.2), "unstable": Trial(10, 0.2)}
    found = descend(trials, "1f1b", depth, 1, steps=928)
    check(trials, found, 928)
    first = next(t for t, value in enumerate(found["unstable"]) if abs(value) > 1e8)
    assert first == 927  # after update 926, counted from 0


def test_momentum_lowers_the_limit_of_double_buffering() -> None:
    """z^2 - (1 + beta) z + beta + rate: with a delay of one, rates below 1 - beta are stable; without, 2 (1 + beta)."""
    betas = (0.0, 0.5, 0.9)
    trials = {f"below {b}": Trial(1, 0.9 * (1 - b), b) for b in betas}
    trials |= {f"above {b}": Trial(1, 1.1 * (1 - b), b) for b in betas}
    check(trials, descend(trials, "2bw", 2, 2, steps=928), 928)
    trials = {f"below {b}": Trial(0, 0.9 * 2 * (1 + b), b) for b in betas}
    trials |= {f"above {b}": Trial(0, 1.1 * 2 * (1 + b), b) for b in betas}
    check(trials, descend(trials, "gpipe", 2, 2, steps=200), 200)
