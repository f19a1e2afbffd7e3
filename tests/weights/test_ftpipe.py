"""FTPipe's predictors against a recursion written out by hand, for a chain of small matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import CapabilityError, ConfigError
from penstock.options.passes import Precision
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.ir.schedule import Op
from penstock.weights.corrections.base import StagePlace
from penstock.weights.decision import LossScale
from penstock.weights.memory.buffers import Layout
from penstock.weights.updates.lr_scheduler_table import by_factor
from support.own_methods import correction_of, prove
from support.snapshots import Kept

LR, GAMMA, BETA1, BETA2, EPS = 0.05, 0.9, 0.8, 0.95, 1e-8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda named, decay: torch.optim.SGD(named, lr=LR, momentum=GAMMA, weight_decay=decay, dampening=0.25),
    "adam": lambda named, decay: torch.optim.Adam(named, lr=LR, betas=(BETA1, BETA2), weight_decay=decay),
    "adamw": lambda named, decay: torch.optim.AdamW(named, lr=LR, betas=(BETA1, BETA2), weight_decay=decay),
}


def rate(update: int) -> float:
    return min((update + 1) / 4, 1.0) * 0.9**update


def one(_: int) -> float:
    return 1.0


class Linear(nn.Module):
    """W x, without a bias; in double precision."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.eye(2, dtype=torch.float64) + 0.3 * torch.randn(2, 2, generator=g).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T


def samples(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randn(1, 2, generator=g, dtype=torch.float64) for _ in range(count)]


@dataclass
class Known:
    """What a stage knows when it has made some updates."""

    w: Tensor
    first: Tensor
    second: Tensor


@dataclass
class Stage:
    """By hand: all that a stage has known, after how many updates, and the gradients of its microbatches."""

    history: list[Known]
    updates: list[int] = field(default_factory=lambda: [0])
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    optimizer: str
    decay: float = 0.0
    aggregated: bool = False
    ahead: bool = True
    decays: bool = False
    stash: bool = False

    def step(self, known: Known, g: Tensor, n: int) -> Known:
        """Update number n, from 0."""
        lr, w = LR * rate(n), known.w
        if self.optimizer == "sgd":
            d = g + self.decay * w
            v = GAMMA * known.first + (0.75 if n else 1.0) * d
            return Known(w - lr * v, v, known.second)
        if self.optimizer == "adam":
            g = g + self.decay * w
        else:
            w = w - lr * self.decay * w
        m, s = BETA1 * known.first + (1 - BETA1) * g, BETA2 * known.second + (1 - BETA2) * g * g
        m_hat, s_hat = m / (1 - BETA1 ** (n + 1)), s / (1 - BETA2 ** (n + 1))
        return Known(w - lr * m_hat / (s_hat.sqrt() + EPS), m, s)

    def predict(self, known: Known, updates: int, made: int, gathered: Tensor | None) -> Tensor:
        """After `made` updates, some updates ahead: with gradients of zero, but for what is gathered."""
        w, first = known.w, known.first
        if not made:
            return w
        gathered = None if gathered is None else torch.where(gathered.isfinite(), gathered, 0.0)
        for j in range(1, updates + 1):
            lr = LR * rate(made + j - 1 if self.ahead else made)
            g = gathered if j == 1 and gathered is not None and self.aggregated else torch.zeros_like(w)
            decay = self.decay if self.decays else 0.0
            if self.optimizer == "sgd":
                first = GAMMA * first + 0.75 * (g + decay * w)
                w = w - lr * first
                continue
            if self.optimizer == "adam":
                g = g + decay * w
            else:
                w = w * (1 - lr * decay)
            first = BETA1 * first + (1 - BETA1) * g
            size = (known.second / (1 - BETA2 ** (made + j))).sqrt() + EPS
            w = w - lr / (1 - BETA1 ** (made + j)) * first / size
        return w


def expected_staleness(done_backwards: int, done_forwards: int, m: int) -> int:
    """FTPipe's rule."""
    return sum(b % m == m - 1 for b in range(done_backwards, done_forwards))


def tokens(g: int) -> float:
    """So that batches of three have 102, 54 and 6 of them."""
    return (17.0 if g % 9 < 5 else 1.0) * (g % 3 + 1)


def by_hand(
    setting: Setting, d: int, m: int, batches: int, spike: int | None = None, weights: Callable[[int], float] = one
) -> list[Tensor]:
    """Endless 1F1B: stage s runs forward g when it has run g - (d-1-s) backwards.

    The loss of microbatch `spike` is infinite, so its batch makes no update. A mean loss is over the weights of the
    microbatches; a gathered gradient over those of the batch before.
    """
    totals = [sum(weights(t * m + k) for k in range(m)) for t in range(batches)]
    start = [Linear(s).w.detach() for s in range(d)]
    stages = [Stage([Known(w, torch.zeros_like(w), torch.zeros_like(w))]) for w in start]
    for g, x in enumerate(samples(batches * m)):
        inputs, read = [x], []
        for s, stage in enumerate(stages):
            done = max(0, g - (d - 1 - s))
            made, n = done // m, expected_staleness(done, g, m)
            gathered = torch.stack(stage.gradients[made * m : done]).sum(0) if done % m else None
            if gathered is not None and made:
                gathered = gathered / totals[made - 1]
            read.append(setting.predict(stage.history[made], n, stage.updates[made], gathered))
            inputs.append(inputs[-1] @ read[-1].T)
        gradient = inputs[-1] * (math.inf if g == spike else 1.0)  # of |y|^2 / 2
        skipped = spike is not None and g // m == spike // m
        for s in reversed(range(d)):
            stage = stages[s]
            stage.gradients.append(gradient.T @ inputs[s])
            gradient = gradient @ (read[s] if setting.stash else stage.history[-1].w)
            if g % m == m - 1:
                whole = torch.stack(stage.gradients[-m:]).sum(0) / totals[g // m]
                number, known = stage.updates[-1], stage.history[-1]
                stage.history.append(known if skipped else setting.step(known, whole, number))
                stage.updates.append(number + (not skipped))
    return [stage.history[-1].w for stage in stages]


def by_pipeline(
    setting: Setting, d: int, m: int, batches: int, spike: int | None = None, scale: LossScale | None = None
) -> list[Tensor]:
    method = "ftpipe-aggregated" if setting.aggregated else "ftpipe"
    options = {"ahead": float(setting.ahead), "weight_decay": float(setting.decays)}
    pipeline = Pipeline(
        [Linear(s) for s in range(d)],
        prove(method, d, m, rule="predicted-stash" if setting.stash else None),
        loss=lambda y, factor: (0.5 * (y * y).sum() * factor, 1.0),
        optimizer=lambda named: OPTIMIZERS[setting.optimizer](named, setting.decay),
        lr_scheduler=by_factor(rate),
        precision=Precision(loss_scale=scale),
        staleness=correction_of(method, **options),
        partition=[1] * d,
    )
    data = [(x, math.inf if g == spike else 1.0) for g, x in enumerate(samples(batches * m))]
    for _ in pipeline.run([data[t * m : t * m + m] for t in range(batches)]):
        pass
    return list(pipeline.state_dict().values())


SETTINGS = [
    *(Setting(o, 0.1, a, decays=d) for o, a, d in product(OPTIMIZERS, (False, True), (False, True))),
    *(Setting(o, ahead=False) for o in OPTIMIZERS),
    *(Setting(o, 0.1, aggregated=True, stash=True) for o in OPTIMIZERS),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: str(s).removeprefix("Setting"))
def test_the_recursion(setting: Setting) -> None:
    for d, m in ((3, 1), (4, 3)) if setting.decay else ((1, 2), (4, 2), (4, 1)):
        found, wanted = by_pipeline(setting, d, m, 9), by_hand(setting, d, m, 9)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divisor", [None, 9.0, 250.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_divisor_does_not_matter_to_what_is_gathered(optimizer: str, divisor: float | None) -> None:
    """Of losses with weights: it is over that of the batch before, also where a run goes on from a snapshot."""
    d, m, batches = 4, 3, 9
    setting = Setting(optimizer, 0.1, aggregated=True)
    data = [(x, tokens(g)) for g, x in enumerate(samples(batches * m))]

    def made() -> Pipeline:
        return Pipeline(
            [Linear(s) for s in range(d)],
            prove("ftpipe-aggregated", d, m),
            loss=lambda y, weight: (0.5 * (y * y).sum(), weight),
            optimizer=lambda named: OPTIMIZERS[optimizer](named, setting.decay),
            lr_scheduler=by_factor(rate),
            precision=Precision(divisor=divisor),
            staleness=correction_of("ftpipe-aggregated"),
            partition=[1] * d,
        )

    taken: list[Snapshot] = []
    whole_batches = [data[t * m : t * m + m] for t in range(batches)]
    whole, drained, resumed = made(), made(), made()
    list(whole.run(whole_batches))
    found, wanted = list(whole.state_dict().values()), by_hand(setting, d, m, batches, weights=tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    list(drained.run(whole_batches, save=Saving(5, taken.append)))
    resumed.load(Kept([snapshot for snapshot in taken if snapshot.batch == 5]))
    list(resumed.run(whole_batches[5:]))
    ends = zip(drained.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in ends)


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.aggregated], ids=lambda s: str(s).removeprefix("Setting"))
def test_what_is_gathered_of_scaled_gradients_and_of_one_that_is_not_finite(setting: Setting) -> None:
    """It does not know the scale; and a batch that overflows leaves no trace but in what read before it was known."""
    scale = LossScale(2.0**9, interval=2)
    found, wanted = by_pipeline(setting, 4, 3, 9, 10, scale), by_hand(setting, 4, 3, 9, 10)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert torch.cat(found).isfinite().all()


def test_the_settings_differ() -> None:
    """So that the test above would notice if one were taken for another."""
    found = {s: torch.cat(by_hand(s, 4, 3, 9)) for s in SETTINGS if s.decay}
    for a, b in product(found, found):
        assert a is b or (found[a] - found[b]).abs().max() > 1e-7, (a, b)


@pytest.mark.parametrize(("n", "coefficient"), [(1, 0.9), (2, 1.71), (4, 3.0951)])
def test_the_coefficient_of_momentum(n: int, coefficient: float) -> None:
    """The sum of gamma^j, j = 1..n: with gamma = 0.9 that is 0.9 and 1.71."""
    known = Known(*(torch.full((1, 1), x, dtype=torch.float64) for x in (5.0, 2.0, 0.0)))
    assert LR * rate(3) * coefficient * 2.0 == pytest.approx(
        5.0 - float(Setting("sgd", ahead=False).predict(known, n, 3, None))
    )
    assert coefficient == pytest.approx((GAMMA - GAMMA ** (n + 1)) / (1 - GAMMA))


@pytest.mark.parametrize(("d", "m"), [(2, 1), (4, 1), (4, 2), (4, 3), (5, 4), (8, 3)])
def test_the_horizon_is_what_ftpipe_s_scheduler_expects(d: int, m: int) -> None:
    """Counted on the schedule: forwards and backwards that a rank has run before each PREDICT, two periods on."""
    schedule, seen = prove("ftpipe", d, m).schedule, 0
    for rank in range(d):
        period = schedule.programs[rank].period
        done = {Op.F: 0, Op.B: 0}
        for t in range(2 * d):
            for action in period:
                first = action.unit.first + t * m if action.unit is not None else 0
                if first < 0:
                    continue
                if action.op is Op.PREDICT:
                    assert action.reads is not None
                    version = max(action.reads.versions[0] + t, 0)
                    seen += 1
                    assert first // m - version == expected_staleness(done[Op.B], done[Op.F], m)
                if action.op in done:
                    assert done[action.op] == first
                    done[action.op] += 1
    assert seen > d * m * d


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "without momentum has no state"),
        (torch.optim.AdamW([nn.Parameter(torch.zeros(1))], amsgrad=True), "maximize or amsgrad"),
        (torch.optim.NAdam([nn.Parameter(torch.zeros(1))]), "not NAdam; use one of these"),
        (torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]), "not Muon"),
    ],
    ids=["momentum", "amsgrad", "nadam", "muon"],
)
def test_other_optimizers_are_refused(optimizer: torch.optim.Optimizer, message: str) -> None:
    correction = correction_of("ftpipe")
    assert correction is not None
    with pytest.raises(CapabilityError, match=message):
        correction.on(Layout({}), StagePlace(0, 2, 1, 1.0, "here")).begin(optimizer)


def test_what_it_does_not_go_with() -> None:
    arguments: dict[str, Any] = {"loss": lambda y, _: y.sum(), "partition": [1, 1]}
    optimizer = {"optimizer": lambda named: OPTIMIZERS["sgd"](named, 0.0)}
    with pytest.raises(CapabilityError, match="set recompute=none"):
        Pipeline(
            [nn.Linear(2, 2), nn.Linear(2, 2)],
            prove("ftpipe", 2, 1),
            staleness=correction_of("ftpipe"),
            recompute="block",
            **arguments,
            **optimizer,
        )
    with pytest.raises(ConfigError, match="has no option 'horizon'; it has ahead, weight_decay"):
        correction_of("ftpipe", horizon=2.0)
