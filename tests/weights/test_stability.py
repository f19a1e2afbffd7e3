"""At which rates delayed descent on a quadratic is stable: the pipeline against the equations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.stability import BETAS, REMEDIES, delayed, largest, limit_of, radius_of, roots_of, synchronous
from torch import Tensor, nn

import penstock
from penstock.options.passes import Staleness
from penstock.runtime.pipeline import Pipeline
from support.cases import Named
from support.schedules import make_schedule


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


@pytest.mark.long
def test_the_stability_limit_of_delayed_descent() -> None:
    """PipeMare (arXiv 1910.05124), lemma 1: of w^2 / 2 with delay tau rates up to 2 sin(pi / (4 tau + 2)) are stable.

    Every block has a weight, a delay and a rate of its own: just below the limit, just above, and 0.2 for two delays.
    """
    trials: dict[str, Trial] = {}
    for tau in (0, 1, 2, 5, 10):
        limit = 2 * math.sin(math.pi / (4 * tau + 2))
        trials |= {f"below {tau}": Trial(tau, 0.95 * limit), f"above {tau}": Trial(tau, 1.05 * limit)}
    trials |= {"stable": Trial(5, 0.2), "unstable": Trial(10, 0.2)}
    found = descend(trials, "1f1b", 2, 1, steps=928)
    check(trials, found, 928)
    first = next(t for t, value in enumerate(found["unstable"]) if abs(value) > 1e8)
    assert first == 927  # after update 926, counted from 0


@pytest.mark.long
def test_momentum_lowers_the_limit_of_double_buffering() -> None:
    """z^2 - (1 + beta) z + beta + rate: with a delay of one, rates below 1 - beta are stable; without, 2 (1 + beta)."""
    betas = (0.0, 0.5, 0.9)
    trials = {f"below {b}": Trial(1, 0.9 * (1 - b), b) for b in betas}
    trials |= {f"above {b}": Trial(1, 1.1 * (1 - b), b) for b in betas}
    check(trials, descend(trials, "2bw", 2, 2, steps=500), 500)
    trials = {f"below {b}": Trial(0, 0.9 * 2 * (1 + b), b) for b in betas}
    trials |= {f"above {b}": Trial(0, 1.1 * 2 * (1 + b), b) for b in betas}
    check(trials, descend(trials, "gpipe", 2, 2, steps=100), 100)


@pytest.mark.long
@pytest.mark.parametrize("beta", [0.9, 0.95])
@pytest.mark.parametrize(
    ("point", "options"),
    [
        (lambda beta: (beta, 1 - beta), {}),
        (lambda _: (1.0, 0.0), {"a": 1.0, "b": 0.0}),
        (lambda _: (1.0, 0.0), {"motion": 1}),
    ],
    ids=["repeat", "a=1", "motion"],
)
def test_reading_ahead_is_stable_up_to_the_limit_of_its_polynomial(
    beta: float, point: Callable[[float], tuple[float, float]], options: dict[str, float]
) -> None:
    """The pipeline on each side of the limit, by 10 percent; the plain delay diverges at both rates."""
    limit = limit_of(delayed(beta, *point(beta)))
    assert limit > 2
    for share, ends in ((0.9, True), (1.1, False)):
        found = largest_weight(penstock.method("2bw-ahead", **options), share * limit * (1 - beta), beta)
        assert found < 0.1 if ends else found > 10


@pytest.mark.long
@pytest.mark.parametrize(("motion", "a", "b"), [(0, 1.8, 0.2), (1, 2.0, 0.0)])
def test_reading_ahead_by_two_is_stable_up_to_the_limit_of_its_polynomial(motion: int, a: float, b: float) -> None:
    limit = limit_of(delayed(0.9, a, b, delay=2))
    assert limit > 2 * limit_of(delayed(0.9, 0.0, 0.0, delay=2))
    for share, ends in ((0.9, True), (1.1, False)):
        found = largest_weight(penstock.method("3bw-ahead", motion=motion), share * limit * 0.1, 0.9)
        assert found < 0.1 if ends else found > 10


@pytest.mark.parametrize("beta", BETAS)
def test_the_limits_that_have_a_closed_form(beta: float) -> None:
    assert limit_of(synchronous(beta)) == pytest.approx(2 * (1 + beta) / (1 - beta), rel=1e-5)
    assert limit_of(delayed(beta, 0.0, 0.0)) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("point", [(0.0, 0.0), (1.0, 0.0), (0.9, 0.1), (0.22, 0.105)])
def test_the_polynomial_has_the_roots_of_the_recursion(point: tuple[float, float]) -> None:
    """The recursion itself, on the state (W, m, P before), as a matrix."""
    beta, x, (a, b) = 0.9, 0.7, point
    m = [0.0, beta, (1 - beta) * x]
    w = [1.0, -m[1], -m[2]]
    p = [w[0], w[1] - a * m[1], w[2] - a * m[2] - b * x]
    step = torch.tensor([[*w, 0.0], [*m, 0.0], [0.0] * 4, [*p, 0.0]], dtype=torch.float64)
    # The state is (W(t), m(t), P(t-1), P(t)): eta is 1 here, so the gradient is x P(t-1).
    step[2] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = torch.linalg.eigvals(step).abs().sort().values
    wanted = roots_of(delayed(beta, a, b)(x)).abs().sort().values
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("no remedy", (0.0, 0.0)),
        ("the last gradient once more", (0.9, 0.1)),
        ("the last motion once more", (1.0, 0.0)),
        ("`error-feedback`", (1.0, 0.0)),  # its weights are the read points of that one
    ],
)
def test_remedies_that_are_played_have_the_limits_of_polynomials(name: str, point: tuple[float, float]) -> None:
    found = largest(lambda x: radius_of(REMEDIES[name], 0.9, x) < 1.0)
    assert found == pytest.approx(limit_of(delayed(0.9, *point)), rel=1e-4)


@pytest.mark.parametrize(
    ("method", "nesterov", "name"),
    [
        ("error-feedback", False, "`error-feedback`"),
        ("2bw", True, "`nag-pp` (NAdam's step), spike compensation"),
        ("2bw-ahead", True, "the same under NAdam"),
    ],
)
def test_a_remedy_is_stable_up_to_its_limit(method: str, nesterov: bool, name: str) -> None:
    """The pipeline on each side of the limit, by 10 percent; a rate of SGD is that of the mean times 1 - beta."""
    limit, beta = largest(lambda x: radius_of(REMEDIES[name], 0.9, x) < 1.0), 0.9
    for share, ends in ((0.9, True), (1.1, False)):
        found = largest_weight(method, share * limit * (1 - beta), beta, nesterov)
        assert found < 0.1 if ends else found > 10


def largest_weight(method: Any, rate: float, beta: float, nesterov: bool = False) -> float:
    """Of the last 20 of 720 updates from 1 on."""
    pipeline = Pipeline(
        {"w": Scalar()},
        method=method,
        stages=1,
        microbatches=1,
        loss=lambda output, _: output,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=beta, nesterov=nesterov),
    )
    start, seen = torch.zeros((), dtype=torch.float64), []
    list(pipeline.run([(start, start)] for _ in range(700)))
    for _ in range(20):
        list(pipeline.run([[(start, start)]]))
        seen += [abs(float(w)) for w in pipeline.state_dict().values()]
    return max(seen)
