"""PipeMare on its own order, against the slots of its hardware played in plain matrices."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.pipeline import Pipeline
from penstock.verify.reference.order_delays import ReferenceOrder
from support.cases import (
    BALANCE,
    OPTIMIZERS,
    Case,
    as_outcome,
    assert_same,
    cut,
    make_batches,
    make_blocks,
    token_loss,
    train,
)
from support.own_methods import correction_of, prove, train_reference

RATE, MOMENTUM, FADE, DECAY = 0.05, 0.9, 9, 0.135


class Map(nn.Module):
    """tanh(x W)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Data(NamedTuple):
    weights: list[Tensor]
    pairs: list[tuple[Tensor, Tensor]]


def data(p: int, count: int) -> Data:
    g = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return Data([draw(3, 3) for _ in range(p)], [(draw(2, 3), draw(2, 3)) for _ in range(count)])


class Stage:
    """One stage of the hardware: newest weights, and what its microbatches have left."""

    def __init__(self, weight: Tensor, tau: float, n: int, corrected: bool) -> None:
        self.weight, self.n = weight.clone(), n
        self.momentum, self.sum, self.motion = (torch.zeros_like(weight) for _ in range(3))
        self.rescale = max(tau, 1.0) if corrected else 1.0
        self.gamma = DECAY ** (1 / tau) if corrected and tau else None
        self.updates = self.backwards = 0
        self.kept: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.out: dict[int, Tensor] = {}
        self.back: dict[int, Tensor] = {}

    def forward(self, j: int, x: Tensor) -> None:
        self.out[j] = torch.tanh(x @ self.weight)
        self.kept[j] = x, self.out[j], self.updates

    def backward(self, j: int, gradient: Tensor) -> None:
        x, y, then = self.kept.pop(j)
        inner = gradient * (1 - y * y)
        late = 0 if self.gamma is None else self.updates - then
        self.back[j] = inner @ (self.weight - late * self.motion).T
        self.sum += x.T @ inner
        self.backwards += 1
        if self.backwards % self.n == 0:
            self.momentum = MOMENTUM * self.momentum + self.sum / self.n
            share = self.rescale ** -(1 - min(self.updates / FADE, 1))
            before, self.weight = self.weight, self.weight - RATE * share * self.momentum
            if self.gamma is not None:
                self.motion = self.gamma * self.motion + (1 - self.gamma) * (self.weight - before)
            self.sum = torch.zeros_like(self.sum)
            self.updates += 1


def hardware(p: int, n: int, given: Data, corrected: bool, forward_first: bool) -> list[Tensor]:
    """Slot by slot; stage i (from 1) runs microbatch j forward in slot j + i - 1 and backward in slot j + 2P - i."""
    delay = [(2 * (p - i) + forward_first) / n for i in range(1, p + 1)]
    stages = [Stage(w, tau, n, corrected) for w, tau in zip(given.weights, delay, strict=True)]
    for slot in range(len(given.pairs) + 2 * p):
        for i in range(p, 0, -1) if forward_first else range(1, p + 1):  # a slot's passes take what slots before gave
            stage, f, b = stages[i - 1], slot - i + 1, slot - 2 * p + i
            for kind in "FB" if forward_first else "BF":
                if kind == "F" and 0 <= f < len(given.pairs):
                    stage.forward(f, given.pairs[f][0] if i == 1 else stages[i - 2].out[f])
                if kind == "B" and 0 <= b < len(given.pairs):
                    last = 2 * (stage.out[b] - given.pairs[b][1])
                    stage.backward(b, last if i == p else stages[i].back[b])
    return [stage.weight for stage in stages]


def pipeline(method: str, order: str, p: int, n: int, count: int) -> list[Tensor]:
    """What the runtime makes of the same microbatches."""
    given = data(p, count)
    made = Pipeline(
        [Map(w) for w in given.weights],
        prove(method, p, n, order=order),
        loss=lambda y, target: (((y - target) ** 2).sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=RATE, momentum=MOMENTUM),
        staleness=correction_of(method, reschedule=FADE, decay=DECAY) if method == "pipemare" else None,
    )
    for _ in made.run([given.pairs[k : k + n] for k in range(0, count, n)]):
        pass
    return list(made.state_dict().values())


SHAPES = [(1, 1), (2, 1), (3, 2), (4, 1), (4, 3)]
ORDERS = [("fine-grained", True), ("endless-eager-1f1b", False)]


@pytest.mark.parametrize(("p", "n"), SHAPES)
@pytest.mark.parametrize(("order", "forward_first"), ORDERS, ids=[name for name, _ in ORDERS])
@pytest.mark.parametrize("method", ["newest", "pipemare"])
def test_the_slots_of_the_hardware(method: str, order: str, forward_first: bool, p: int, n: int) -> None:
    """20 updates; the delay in T1, T2 and the passes is 2 (P - i) + 1 forwards first, and 2 (P - i) backwards first."""
    wanted = hardware(p, n, data(p, 20 * n), method == "pipemare", forward_first)
    found = pipeline(method, order, p, n, 20 * n)
    for i, (w, said) in enumerate(zip(found, wanted, strict=True)):
        assert torch.allclose(w, said, rtol=1e-9, atol=1e-11), i
        assert not torch.allclose(w, data(p, 0).weights[i], rtol=1e-2), "it learns"


def test_the_order_makes_a_difference() -> None:
    one, other, usual = (
        pipeline("pipemare", name, 3, 1, 12)[0] for name in ("fine-grained", "endless-eager-1f1b", "endless-1f1b")
    )
    assert not torch.allclose(one, other)
    assert not torch.allclose(one, usual)


@pytest.mark.parametrize(("p", "n"), [(2, 1), (4, 3)])
@pytest.mark.parametrize(("order", "forward_first"), ORDERS, ids=[name for name, _ in ORDERS])
@pytest.mark.parametrize("method", ["newest", "pipemare", "lwp", "stash"])
def test_the_reference_with_the_delays_of_the_order(
    method: str, order: str, forward_first: bool, p: int, n: int
) -> None:
    """Microbatch k of a batch is read ceil((2 (P - i) + 1 - k) / N) updates late, or by one microbatch less."""
    options = {"reschedule": 4} if method == "pipemare" else {}
    correction = correction_of(method, **options) if method in ("pipemare", "lwp") else None
    case = Case(method, p, n, optimizer="momentum", correction=correction, spans=(9,), skips=(), rate=False)
    late = [2 * (p - 1 - s) + forward_first for s in range(p)]
    result = train_reference(
        cut(make_blocks(case.model), BALANCE[p]),
        token_loss,
        make_batches(case),
        method=method,
        optimizer=OPTIMIZERS["momentum"],
        divisor=case.divisor,
        seed=0,
        options=options,
        order=ReferenceOrder([[-((k - w) // n) for k in range(n)] for w in late]),
    )
    assert_same(train(None, case, method=prove(method, p, n, order=order)), as_outcome(result))


def test_with_adam_corrections_cost_a_quarter_more() -> None:
    """Weights, gradient and two moments; and delta on every stage, as all have a delay: 1.25 times as much."""
    bytes_of = {}
    for method in ("newest", "pipemare"):
        made = Pipeline(
            [nn.Linear(16, 16, bias=False) for _ in range(3)],
            prove(method, 3, 2, order="fine-grained"),
            loss=lambda y, t: (((y - t) ** 2).sum(), 1.0),
            optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
            staleness=correction_of(method, reschedule=0) if method == "pipemare" else None,
        )
        for _ in made.run([[(torch.ones(1, 16), torch.zeros(1, 16))] * 2] * 4):
            pass
        live = [made.live_bytes()[rank] for rank in range(3)]
        kinds = ("weights", "gradients", "idle buffers", "correction")
        states = [[v for v in o.state_dict()["state"][0].values() if v.numel() > 1] for o in made.optimizers().values()]
        bytes_of[method] = [
            sum(here.get(kind, 0) for kind in kinds) + sum(v.nbytes for v in state)
            for here, state in zip(live, states, strict=True)
        ]
    assert bytes_of["newest"] == [4 * 16 * 16 * 4] * 3
    assert [now / before for now, before in zip(bytes_of["pipemare"], bytes_of["newest"], strict=True)] == [1.25] * 3
