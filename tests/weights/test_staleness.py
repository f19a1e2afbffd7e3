"""What staleness does, and what is done about it, on problems whose behaviour is known: by running the pipeline."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.pipeline import Pipeline
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.weights.corrections.prediction import horizons
from support.own_methods import correction_of, prove

CURVATURE, SENSITIVITY = 1.0, 5.0


class Discrepant(torch.autograd.Function):
    """w, whose gradient is that of the loss less SENSITIVITY w, with w as the backward reads it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        return gradient - SENSITIVITY * w


class Weight(nn.Module):
    """One number, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, _: Tensor) -> Tensor:
        return Discrepant.apply(self.w)  # type: ignore[no-any-return,no-untyped-call]


def trajectory(method: str, depth: int, rate: float, updates: int, **options: float | None) -> float:
    """Lemma 2 of PipeMare: w(t+1) = w(t) - rate ((L + S) w(t - tau) - S u), u what backwards read; tau = depth - 1."""
    pipeline = Pipeline(
        [Weight(), *(lambda x: x * 1.0 for _ in range(depth - 1))],
        prove(method, depth, 1),
        loss=lambda o, _: ((0.5 * (CURVATURE + SENSITIVITY) * o**2).sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=rate),
        staleness=correction_of(method, **options),
        partition=[1] * depth,
    )
    x = torch.zeros(1, dtype=torch.float64)
    for _ in pipeline.run([[(x, x)]] * updates):
        pass
    return float(next(iter(pipeline.state_dict().values())))


def by_hand(tau: int, rate: float, updates: int, decay: float | None) -> float:
    """The same as a recursion of one number; without T2 where `decay` is None."""
    w, delta = [1.0], 0.0
    gamma = decay ** (1 / tau) if decay is not None else 0.0
    for t in range(updates):
        then = w[max(t - tau, 0)]
        now = w[t] if decay is None else w[t] - (t - max(t - tau, 0)) * delta
        w.append(w[t] - rate * ((CURVATURE + SENSITIVITY) * then - SENSITIVITY * now))
        delta = gamma * delta + (1 - gamma) * (w[-1] - w[-2])
    return w[-1]


@pytest.mark.parametrize(("depth", "rate"), [(2, 0.1), (5, 0.05), (5, 0.1)])
@pytest.mark.parametrize("decay", [None, 0.135])
def test_the_recursion_of_the_lemma(depth: int, rate: float, decay: float | None) -> None:
    found = trajectory("pipemare", depth, rate, 60, reschedule=0, decay=decay)
    assert found == pytest.approx(by_hand(depth - 1, rate, 60, decay), rel=1e-9)


@pytest.mark.long
def test_discrepancy_correction_moves_the_limit_of_the_rate() -> None:
    """tau = 10, sensitivity 5: the limit is 0.0176 without T2 and 0.0973 with it; here is a rate in between."""
    without = trajectory("pipemare", 11, 0.05, 250, reschedule=0, decay=None)
    corrected = trajectory("pipemare", 11, 0.05, 250, reschedule=0)
    assert abs(without) > 1e3
    assert abs(corrected) < 0.1


@pytest.mark.long
def test_lower_rates_make_up_for_long_delays_at_first() -> None:
    """T1 with K without end: the stage behind a delay of 10 steps by a tenth, which is below the limit of 0.0176."""
    found = trajectory("pipemare", 11, 0.1, 250, reschedule=10**9, decay=None)
    assert abs(found) < 0.5


@pytest.mark.parametrize(
    ("name", "n", "m", "forward", "backward"),
    [
        ("spectrain", 4, 1, [3, 2, 2, 1], [0, 0, 1, 1]),
        ("spectrain", 3, 1, [2, 1, 1], [0, 0, 1]),
        ("spectrain-stash", 4, 1, [3, 2, 1, 0], [3, 2, 1, 0]),
        ("pipeoptim", 4, 1, [3, 2, 1, 0], [0, 0, 0, 0]),
        ("spectrain", 4, 2, [1.5, 1, 1, 0.5], [0, 0, 0.5, 0.5]),
        ("spectrain-stash", 4, 8, [0.375, 0.25, 0.125, 0], [0.375, 0.25, 0.125, 0]),
        ("pipeoptim", 4, 8, [0.375, 0.25, 0.125, 0], [0, 0, 0, 0]),
        ("xpipe", 4, 2, [2, 2, 2, 1], [0, 0, 1, 1]),  # of 2, 1.75, 1.5, 1.25 and 0.5, 0.5, 1, 1
    ],
)
def test_how_far_ahead_methods_predict(name: str, n: int, m: int, forward: list[float], backward: list[float]) -> None:
    found = [horizons(name, k, n, m) for k in range(n)]
    assert [f for f, _ in found] == forward
    assert [b for _, b in found] == backward


@pytest.mark.parametrize(("p", "m"), [*product((1, 2, 4, 8), (1, 2, 3, 8))])
def test_delays_and_copies_of_one_forward_one_backward(p: int, m: int) -> None:
    """With m microbatches to an update, stage i of p sees (p - i) / m updates between its passes, on average."""
    for method, backward in (("newest", 0), ("stash", None), ("pipemare", 0)):
        stages = prove(method, p, m).stages
        for stage, facts in stages.items():
            behind = p - 1 - stage.index
            assert facts.delay.forward == pytest.approx(behind / m)
            assert facts.delay.backward == pytest.approx(behind / m if backward is None else backward)
            assert facts.versions == (1 if method != "stash" else -(-behind // m) + 1)


@pytest.mark.parametrize(("s", "wanted"), [(1, 0), (2, 3), (3, 7), (4, 14), (5, 22), (8, 60)])
def test_the_longest_delay_counted_over_all_stages(s: int, wanted: int) -> None:
    """Updates of all stages between a stage's forward and its own update: floor(S^2 - S/2) (arXiv 2606.03498).

    In the steady state of 1F1B with an update for each microbatch, and passes of one length.
    """
    assert wanted == (2 * s * s - s) // 2
    proof = prove("stash", s, 1)
    costs = Costs.uniform(proof.schedule, forward=1.0, backward_input=0.5, backward_weight=0.5)
    timeline = simulate_schedule(proof, costs, batches=4 * s + 2).timeline
    updates = [i.end for i in timeline.intervals if i.what == "B"]  # each is followed by an update at once
    forwards = {(i.stage, i.microbatch): i.start for i in timeline.intervals if i.what == "F"}
    delays = [
        sum(forwards[i.stage, i.microbatch] < end <= i.start for end in updates)
        for i in timeline.intervals
        if i.what == "B" and 2 * s <= i.microbatch < 3 * s + 2
    ]
    assert max(delays) == wanted


@pytest.mark.parametrize(("p", "m"), [(4, 16), (2, 3), (8, 8)])
def test_a_pipeline_that_is_drained_is_busy_for_m_of_m_plus_p_less_one(p: int, m: int) -> None:
    """Also without flushes: M microbatches from an empty pipeline to an empty one. 4 and 16: 0.8421."""
    proof = prove("stash", p, 1)
    bubble = simulate_schedule(proof, Costs.uniform(proof.schedule), batches=m).bubble.bubble
    assert 1 - bubble == pytest.approx(m / (m + p - 1))


class Scaled(nn.Module):
    """One number, times what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def after_an_impulse(method: str, depth: int, nesterov: bool, batches: int) -> list[float]:
    """The first stage's weight after each update; its gradient is 1 in the first batch, and 0 later."""
    seen: list[float] = []

    def factory(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.125, momentum=0.9, nesterov=nesterov)

    pipeline = Pipeline(
        [Scaled(), *(lambda x: x * 1.0 for _ in range(depth - 1))],
        prove(method, depth, 1),
        loss=lambda o, _: (o.sum(), 1.0),
        optimizer=factory,
        staleness=correction_of(method),
        partition=[1] * depth,
    )
    for t in range(batches):
        x = torch.full((1,), float(t == 0), dtype=torch.float64)
        for _ in pipeline.run([[(x, x)]]):
            pass
        seen.append(float(next(iter(pipeline.state_dict().values()))))
    return seen


def test_a_late_gradient_of_a_pipeline_catches_up_at_once() -> None:
    """Spike compensation with D = 4, momentum 0.9: a + b = 0.6561 + 3.439 at first, 0.9^(4 + k) later."""
    steps = [0.6561 + 3.439, *(0.9 ** (4 + k) for k in range(1, 6))]
    assert after_an_impulse("spike", 5, False, 6) == pytest.approx([1 - 0.125 * sum(steps[:k]) for k in range(1, 7)])


def test_to_catch_up_with_one_update_is_nesterov_s_momentum() -> None:
    assert after_an_impulse("spike", 2, False, 6) == pytest.approx(after_an_impulse("newest", 2, True, 6), rel=1e-12)


def test_nadam_s_momentum_after_a_thousand_updates() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.NAdam([parameter], lr=0.0, betas=(0.99, 0.999))
    for t in range(2):
        parameter.grad = torch.ones_like(parameter)
        if t:
            optimizer.state[parameter] |= {
                "step": torch.tensor(999.0),
                "mu_product": torch.ones((), dtype=torch.float64),
            }
        optimizer.step()
    assert float(optimizer.state[parameter]["mu_product"]) == pytest.approx(0.5695734528, rel=1e-9)


def test_nadam_s_momentum_grows_slowly() -> None:
    """mu = beta1 (1 - 0.96^(0.004 t) / 2), of which NAG-PP makes use: 0.57 after 1000 updates with beta1 = 0.99."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.NAdam([parameter], lr=0.0, betas=(0.99, 0.999))
    product = 1.0
    for t in range(1, 21):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        before, product = product, float(optimizer.state[parameter]["mu_product"])
        if t in (1, 20):
            assert product / before == pytest.approx(0.99 * (1 - 0.5 * 0.96 ** (0.004 * t)), rel=1e-4)
