"""The reference of delayed methods against tables, limits and identities of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.verify.reference.corrections import Discrepancy, Rescheduling
from penstock.verify.reference.delays import mean_delay, prediction_horizons, version_read
from penstock.verify.reference.predictions import velocity
from support.delayed_by_hand import nadam, referred
from support.own_methods import names_in, train_reference
from support.reference_cases import BATCHES, Times, half_square, of, sgd
from support.scalar_pipelines import DECAY, LR, MOMENTUM, SKIPPED, rate


def test_tables_of_horizons() -> None:
    """SpecTrain for 3 and 4 devices, its stashing variant, which is PipeOptim's, and XPipe for 4 devices, T = 2."""

    def table(method: str, d: int, m: int = 1) -> list[tuple[float, float | None]]:
        return [prediction_horizons(method, s, d, m) for s in range(d)]

    assert table("spectrain", 4) == [(3, 0), (2, 0), (2, 1), (1, 1)]
    assert table("spectrain", 3) == [(2, 0), (1, 0), (1, 1)]
    assert table("spectrain-stash", 4) == table("pipeoptim", 4) == [(3, None), (2, None), (1, None), (0, None)]
    assert table("xpipe", 4, 2) == [(2, 0), (2, 0), (2, 1), (1, 1)]
    assert table("spectrain", 4, 2) == [(1.5, 0), (1, 0), (1, 0.5), (0.5, 0.5)]  # halves of the first table
    assert table("pipeoptim", 4, 8) == [(0.375, None), (0.25, None), (0.125, None), (0, None)]


def test_delays_of_1f1b() -> None:
    """P - i updates between forward and backward with one microbatch each; the mean is the m-th part with m."""
    for d in (1, 2, 4, 8):
        for m in (1, 2, 3, 8):
            for s in range(d):
                assert mean_delay(s, d, m) == pytest.approx((d - 1 - s) / m, abs=1e-15)
                delays = {50 - version_read("newest", 50, k, m, s, d, 0) for k in range(m)}
                assert min(delays) == (d - 1 - s) // m
                assert max(delays) == -((s + 1 - d) // m)


def test_rescheduled_rates() -> None:
    t1 = Rescheduling(7.0, 100)
    assert 0.1 * t1(0) == pytest.approx(0.0142857, abs=1e-7)
    assert 0.1 * t1(50) == pytest.approx(0.037796, abs=1e-6)
    assert t1(100) == t1(1000) == 1.0
    assert Rescheduling(0.25, 100)(0) == Rescheduling(7.0, 0)(0) == 1.0


class Drifting:
    """As much of a stage as T2 looks at."""

    def __init__(self, t2: Discrepancy, w: Tensor) -> None:
        self.t2, self.versions, self.made = t2, [{"w": w}], True

    def go(self, w: Tensor) -> None:
        self.versions.append({"w": w})
        self.t2.on_version(self)  # type: ignore[arg-type]

    def estimate(self, delay: int) -> Tensor:
        reads = self.t2.read(self, max(len(self.versions) - 1 - delay, 0))  # type: ignore[arg-type]
        assert reads[1] is not None
        return reads[1]["w"]


def test_discrepancy_under_a_constant_drift() -> None:
    t2 = Discrepancy(7.0, 0.135)
    assert t2.gamma == pytest.approx(0.75121, abs=1e-5)
    stage = Drifting(t2, of(0.0))
    for t in range(1, 200):
        stage.go(of(float(t)))
        if t in (7, 21):
            assert float(t2.delta["w"]) == pytest.approx({7: 0.865, 21: 0.99754}[t], abs=1e-5)
    assert float(stage.estimate(7)) == pytest.approx(199.0 - 7.0, abs=1e-9)
    assert float(stage.estimate(0)) == 199.0


@pytest.mark.parametrize(("corrected", "limit"), [(False, 0.017556), (True, 0.097295)])
def test_limits_of_stability(corrected: bool, limit: float) -> None:
    """Lemma 2 of PipeMare: f = w^2 / 2, sensitivity 5, forward 10 updates late, backward not."""
    alphas = limit * torch.tensor([0.98, 1.02], dtype=torch.float64)
    stage = Drifting(Discrepancy(10.0, 0.135), torch.ones(2, dtype=torch.float64))
    for _ in range(4000):
        newest, late = stage.versions[-1]["w"], stage.versions[max(len(stage.versions) - 11, 0)]["w"]
        backward = stage.estimate(10) if corrected else newest
        stage.go((newest - alphas * (6.0 * late - 5.0 * backward)).clamp(-1e9, 1e9))
    end = torch.stack([version["w"].abs() for version in stage.versions[-50:]]).amax(0)
    assert float(end[0]) < 0.1
    assert float(end[1]) > 10.0


def test_spike_compensation_of_one_update_is_nesterov() -> None:
    def nesterov_first(named: Any) -> torch.optim.Optimizer:
        first = named[0][0].startswith("b0")
        return torch.optim.SGD(named, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=first)

    found, wanted = referred("spike", 2, 1), referred("stash", 2, 1, nesterov_first)
    for a, b in zip(found, wanted, strict=True):
        assert a == pytest.approx(b, rel=1e-12)


def test_a_late_gradient_of_the_reference_catches_up_at_once() -> None:
    """m = 0.9, D = 4: a = 0.6561, b = 3.439, and what one gradient adds up to is the same as without delay."""

    class Held:
        def __init__(self) -> None:
            self.w = nn.Parameter(of(0.0))
            self.optimizer = torch.optim.SGD([self.w], lr=1.0, momentum=0.9)

    stage = Held()
    spike, walked = names_in("pipelined_backprop")["Spike"](4.0), []
    with torch.no_grad():
        for k in range(300):
            stage.w.grad = of(float(k == 0))
            before = float(stage.w)
            spike(stage)
            walked.append(before - float(stage.w))
    assert walked[0] == pytest.approx(4.0951)
    assert walked[1] == pytest.approx(0.9**5)
    assert sum(walked) == pytest.approx(1 / (1 - 0.9))


def test_xpipe_predicts_a_third_of_an_adam_step() -> None:
    w = nn.Parameter(of(0.0))
    adam = torch.optim.Adam([w], lr=1.0, betas=(0.9, 0.999))
    adam.state[w] = {"step": torch.tensor(1e6), "exp_avg": of(2.0), "exp_avg_sq": of(4.0)}
    printed, real = velocity(adam, w, "paper"), velocity(adam, w, "adam")
    assert printed is not None
    assert real is not None
    assert float(printed / real) == pytest.approx(0.316228, abs=1e-6)


def test_momenta_of_nag_pp() -> None:
    stages = [{f"b{s}": Times(0.9)} for s in range(8)]
    result = train_reference(
        *(stages, half_square, [[(of(1.0), of(1.0))]]),
        method="nag-pp-no-stash",
        optimizer=nadam,
        options={"reschedule": 10},
    )
    momenta = [state["param_groups"][0]["betas"][0] for state in result.optimizers]
    assert momenta == pytest.approx([0.97875, 0.9675, 0.95625, 0.945, 0.93375, 0.9225, 0.91125, 0.9])


@pytest.mark.parametrize("d", [1, 3])
def test_feedback_on_a_quadratic(d: int) -> None:
    """f = w^2 / 2, read one update late: w' = w + 2 u - (u before), u being what the optimizer would do."""
    w, v, u_before = [1.2], 0.0, None
    for t in range(BATCHES):
        if t == SKIPPED:
            w.append(w[-1])
            continue
        read = w[max(t - 1, 0)]
        v = MOMENTUM * v + read + DECAY * w[-1]
        u = -LR * rate(t - (t > SKIPPED)) * v
        w.append(w[-1] + u + (0.0 if u_before is None else u - u_before))
        u_before = u
    stages: list[dict[str, Any]] = [{"a": Times(1.2)}, *({f"id{k}": lambda x: x} for k in range(d - 1))]
    batches = [[(of(1.0), of(float(t != SKIPPED)))] for t in range(BATCHES)]

    def loss(output: Tensor, weight: Tensor) -> tuple[Tensor, float]:
        return weight * output**2 / 2, float(weight)

    result = train_reference(stages, loss, batches, method="error-feedback", optimizer=sgd, rate=rate)
    assert [float(version["a.w"]) for version in result.versions] == pytest.approx(w, rel=1e-10)
