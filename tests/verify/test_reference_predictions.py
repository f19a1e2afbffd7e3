"""The reference of FTPipe's predictions, and of predictions for Muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError
from penstock.verify.reference import ReferenceOrder, Scaling
from penstock.verify.reference.muon import muon_direction
from support import scalar_pipelines as by_hand
from support.own_methods import names_in, own, train_reference
from support.reference_cases import adamw, assert_equal, half_square, of, sgd
from support.reference_players import assert_same, bent, played, referred, samples, trained
from support.scalar_orders import Pass
from support.scalar_pipelines import BETAS, EPS, LR, MOMENTUM, rate


class FTPipe(by_hand.Newest):
    """Makes the updates that are expected, one after the other, without gradients."""

    def expected(self, g: int) -> int:
        """The scheduler's rule: microbatches that are under way and will end a batch."""
        return sum(b % self.m == self.m - 1 for b in range(self.backwards, g))

    def gradient(self) -> float:
        return 0.0

    def ahead(self, g: int) -> float:
        w, v = self.w, self.v
        for j in range(self.expected(g) if self.made else 0):
            v = MOMENTUM * v + (0.0 if j else self.gradient())
            w -= LR * rate(self.made + j) * v
        return w


class Aggregated(FTPipe):
    def gradient(self) -> float:
        return self.partial


class FTPipeAdamW(by_hand.AdamW, FTPipe):
    def ahead(self, g: int) -> float:
        w, first = self.w, self.first
        for j in range(self.expected(g) if self.made else 0):
            n = self.made + j + 1
            first = BETAS[0] * first + (1 - BETAS[0]) * (0.0 if j else self.gradient())
            size = (self.second / (1 - BETAS[1] ** n)) ** 0.5 + EPS
            w -= LR * rate(self.made + j) * first / (1 - BETAS[0] ** n) / size
        return w


class AggregatedAdamW(FTPipeAdamW, Aggregated):
    pass


def endless(s: int, d: int, m: int, batches: int) -> list[Pass]:
    return [(op, (g,)) for op, g in by_hand.order(s, d, batches * m)]


CASES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "ftpipe": ("ftpipe", FTPipe, sgd, {}),
    "ftpipe with AdamW": ("ftpipe", FTPipeAdamW, adamw, {}),
    "aggregated": ("ftpipe-aggregated", Aggregated, sgd, {}),
    "aggregated with AdamW": ("ftpipe-aggregated", AggregatedAdamW, adamw, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("d", "m"), [(1, 2), (2, 1), (4, 1), (4, 2), (4, 3), (3, 4)])
def test_ftpipe_by_hand(case: str, d: int, m: int) -> None:
    """25 batches, one of them without weight, drained before the twelfth; the rate changes from update to update."""
    method, kind, optimizer, options = CASES[case]
    found = referred(method, d, m, optimizer, options=options, drains=[11])
    assert_equal(found, played(kind, d, m, endless, 11))


def test_the_cases_differ() -> None:
    ends = [
        referred(method, 4, 3, optimizer, options=options)[0][-1] for method, _, optimizer, options in CASES.values()
    ]
    assert len(set(ends)) == len(CASES)


@pytest.mark.parametrize("method", ["ftpipe", "ftpipe-aggregated"])
def test_nothing_is_predicted_without_delay(method: str) -> None:
    assert_same(trained(method, 1, 3), trained("1f1b", 1, 3))
    if method == "ftpipe":
        assert_same(trained(method, 3, 2, order=ReferenceOrder([[0, 0]] * 3)), trained("1f1b", 3, 2))


def test_one_microbatch_to_a_batch_leaves_nothing_to_aggregate() -> None:
    """The gradient of an open batch is 0 whenever a forward comes: the same numbers up to rounding."""
    found, wanted = (referred(method, 4, 1) for method in ("ftpipe-aggregated", "ftpipe"))
    assert_equal(found, wanted)


def test_aggregated_gradients_do_not_know_the_loss_scale() -> None:
    """A power of two changes no bit."""
    scaled = trained("ftpipe-aggregated", 4, 3, scaling=Scaling(1024.0, 2.0, 0.5, 3))
    assert_same(scaled, trained("ftpipe-aggregated", 4, 3))
    assert len(set(scaled.scales)) > 3


def test_aggregated_gradients_do_not_know_the_divisor() -> None:
    """They are over the weight of the batch before, 6 times as much as there are microbatches."""

    def weighted(y: Tensor, target: Tensor) -> tuple[Tensor, float]:
        total, weight = half_square(y, target)
        return 6.0 * total, 6.0 * weight

    def run(loss: Any, divisor: float | None) -> list[dict[str, Tensor]]:
        arguments: dict[str, Any] = {"method": "ftpipe-aggregated", "optimizer": sgd, "divisor": divisor}
        return train_reference(bent(4), loss, samples(3), **arguments).versions

    wanted = run(half_square, None)
    for loss, divisor in ((half_square, 100.0), (weighted, None), (weighted, 0.5)):
        for found, version in zip(run(loss, divisor), wanted, strict=True):
            for name, w in version.items():
                torch.testing.assert_close(found[name], w, rtol=1e-10, atol=1e-13)


def test_parallel_pipelines_aggregate_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the same data have the mean gradient of one; each sees half of it when it predicts."""
    reading = own("ftpipe-aggregated").reference.__globals__["Decaying"]

    def run(parts: Any, divisor: float) -> list[dict[str, Tensor]]:
        batches = [[one for one in batch for _ in parts] for batch in samples(3)]
        arguments: dict[str, Any] = {"method": "ftpipe-aggregated", "optimizer": sgd, "divisor": divisor}
        return train_reference(bent(4), half_square, batches, parts=parts, **arguments).versions

    two = run([[0, 2, 4], [1, 3, 5]], 3.0)
    note = reading.after_microbatch
    monkeypatch.setattr(reading, "after_microbatch", lambda self, *rest: note(self, *rest[:-1], 2.0 * rest[-1]))
    for found, wanted in zip(two, run([[0, 1, 2]], 3.0), strict=True):
        for name, w in wanted.items():
            torch.testing.assert_close(found[name], w, rtol=1e-12, atol=0)


def test_coefficients() -> None:
    """gamma = 0.9: 0.9 after one update, 1.71 after two; rates of their own for each."""
    group, file = {"momentum": 0.9, "dampening": 0.0}, names_in("ftpipe")

    def moved(n: int, rates: list[float], g: Tensor | None = None) -> float:
        return -float(file["_ahead"](of(0.0), n, file["Known"]({"momentum_buffer": of(1.0)}, group, rates), g))

    assert moved(1, [1.0]) == pytest.approx(0.9)
    assert moved(2, [1.0, 1.0]) == pytest.approx(1.71)
    assert moved(2, [0.5, 2.0]) == pytest.approx(0.45 + 1.62)
    assert moved(2, [1.0, 1.0], of(1.0)) == pytest.approx(1.9 + 1.71)


def test_what_ftpipe_does_not_take() -> None:
    with pytest.raises(CapabilityError, match="NAdam has no velocity to predict weights from"):
        trained("ftpipe", 2, 1, lambda named: torch.optim.NAdam(named))
    with pytest.raises(CapabilityError, match="SGD has no velocity"):
        trained("ftpipe-aggregated", 2, 1, lambda named: torch.optim.SGD(named, lr=0.1))
    with pytest.raises(ConfigError, match="the order of 1F1B alone"):
        trained("ftpipe-aggregated", 2, 1, order=ReferenceOrder([[1], [0]]))
    with pytest.raises(ConfigError, match="without weight decay, and each update at its own rate"):
        trained("ftpipe", 2, 1, options={"ahead": 0})


# --- Muon -------------------------------------------------------------------------------------------------------------


def torch_goes_by(matrix: Tensor, **changes: Any) -> Tensor:
    """A step of torch's from 0 whose momentum is this matrix, by a rate of 1."""
    w = nn.Parameter(torch.zeros_like(matrix))
    w.grad = matrix.clone()
    torch.optim.Muon([w], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, **changes).step()
    return -w.detach()


SETTINGS = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7, "adjust_lr_fn": None}


@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (3, 7), (1, 5), (64, 48)])
@pytest.mark.parametrize("how", [None, "match_rms_adamw"])
def test_muon_goes_where_torch_goes(shape: tuple[int, int], how: str | None) -> None:
    torch.manual_seed(0)
    for size in (1.0, 1e-5, 0.0):
        matrix = size * torch.randn(shape)
        found = muon_direction(matrix, SETTINGS | {"adjust_lr_fn": how})
        assert torch.equal(found, torch_goes_by(matrix, adjust_lr_fn=how))


@pytest.mark.parametrize("shape", [(5, 5), (6, 3)])
def test_muon_bends_singular_values(shape: tuple[int, int]) -> None:
    """Five times a x + b x^3 + c x^5, from x = s / |M|; the directions of the singular vectors stay."""
    torch.manual_seed(1)
    matrix = torch.randn(shape)
    U, S, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    x = S / S.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    wanted = math.sqrt(max(1.0, shape[0] / shape[1])) * (U * x) @ Vh
    torch.testing.assert_close(muon_direction(matrix, SETTINGS).double(), wanted, rtol=0, atol=0.06)
    assert 0.5 < float(x.min()) < float(x.max()) < 1.3


class Both(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        kinds: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.Muon, torch.optim.AdamW]
        chosen = [[p for _, p in named if (p.ndim == 2) == matrices] for matrices in (True, False)]
        self.inner = [kind(ps, lr=0.05) for kind, ps in zip(kinds, chosen, strict=True) if ps]
        super().__init__([p for _, p in named], {})
        self.param_groups = [group for optimizer in self.inner for group in optimizer.param_groups]
        for optimizer in self.inner:
            optimizer.state = self.state

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner:
            optimizer.step()


def muon(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(named, lr=0.05, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize("method", ["pipeoptim", "spectrain-stash", "lwp", "xpipe"])
@pytest.mark.parametrize("optimizer", [muon, Both], ids=["muon", "both"])
def test_predictions_for_muon(method: str, optimizer: Any) -> None:
    """The gradient of a later batch, from the weights and the optimizer's state that another run has ended with."""
    torch.manual_seed(2)
    batches = [[(torch.randn(6, 4), torch.randn(6, 3))] for _ in range(6)]
    stages = [{"a": nn.Linear(4, 5, bias=optimizer is Both)}, {"b": nn.Linear(5, 3, bias=optimizer is Both)}]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return ((y - target) ** 2).sum() / 2

    def run(count: int) -> Any:
        arguments: dict[str, Any] = {"method": method, "optimizer": optimizer, "rate": lambda k: 1.0 + k / 8}
        return train_reference(stages, loss, batches[:count], **arguments)

    t, whole = 5, run(6)
    forward = {"xpipe": (1, 0), "lwp": (1.0, 0.0)}.get(method, (1, 0))
    x, target = batches[t][0]
    read: list[dict[str, Tensor]] = []
    for s, name in enumerate("ab"):
        v = t - 1 + s  # stage 0 runs one microbatch ahead
        settings = run(v).optimizers[s]
        read.append({})
        numbers = [n for group in settings["param_groups"] for n in group["params"]]
        for key, number in zip([f"{name}.weight", f"{name}.bias"], numbers, strict=False):
            w, state = whole.versions[v][key], settings["state"][number]
            if w.ndim == 2:
                go = torch_goes_by(state["momentum_buffer"], adjust_lr_fn=settings["param_groups"][0]["adjust_lr_fn"])
            else:
                paper = method == "xpipe"
                n = 1 if paper else v
                go = state["exp_avg"] / (1 - 0.9**n) / ((state["exp_avg_sq"] / (1 - 0.999**n)).sqrt() + 1e-8)
            read[s][key] = w - (forward[s] * 0.05 * (1.0 + v / 8)) * go
    zero = torch.zeros(())
    h = x @ read[0]["a.weight"].T + read[0].get("a.bias", zero)
    e = h @ read[1]["b.weight"].T + read[1].get("b.bias", zero) - target
    torch.testing.assert_close(whole.gradients[t]["b.weight"], e.T @ h, rtol=1e-5, atol=1e-5)
    last = whole.versions[t]["b.weight"] if method in ("pipeoptim", "lwp") else read[1]["b.weight"]
    torch.testing.assert_close(whole.gradients[t]["a.weight"], (e @ last).T @ x, rtol=1e-5, atol=1e-5)
    plain = x @ whole.versions[t - 1]["a.weight"].T + whole.versions[t - 1].get("a.bias", zero)
    assert float((plain - h).abs().max()) > 1e-2


def test_muon_beside_something_unknown() -> None:
    class Beside(Both):
        def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
            super().__init__(named)
            self.param_groups.append({"params": [], "lr": 0.1, "momentum": 0.5})

    stages = [{"a": nn.Linear(3, 3)}]
    for kind in (Beside, torch.optim.NAdam):
        with pytest.raises(CapabilityError, match=f"{kind.__name__} has no velocity.* or Muon"):
            train_reference(
                *(stages, half_square, [[(torch.ones(1, 3), of(1.0))]]),
                method="pipeoptim",
                optimizer=lambda named, kind=kind: kind(named if kind is Beside else [p for _, p in named]),
            )
