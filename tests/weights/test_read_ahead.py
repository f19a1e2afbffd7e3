"""2BW that reads ahead, around its runs: evaluations, weights written from outside, and going back to a flush."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import penstock
from penstock.errors import ConfigError
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update.run_events import Evaluated
from support.cases import Case, assert_equal_tensors, expected, make_batches, make_pipeline
from support.correction_cases import KINDS, case_of, snapshots_of
from support.plain_training import make_data, make_model, pipeline_of_model
from support.schedules import prove
from support.snapshots import Kept

NAMES = ("2bw-ahead", "2bw-ahead by motion")


def case_named(name: str, batches: int) -> Case:
    return case_of(name, 3, 4, spans=(batches,), skips=())


def loss_of(case: Case, weights: dict[str, torch.Tensor], data: list) -> float:
    """The loss of a pipeline that reads just these weights."""
    plain = make_pipeline(Case("1f1b", case.depth, case.m, case.model))
    plain.load_state_dict(weights)
    found = plain.evaluate(data)
    assert found is not None
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_evaluations_read_the_weights_and_not_what_is_predicted(name: str) -> None:
    case = case_named(name, 7)
    batches, data = make_batches(case), make_batches(case)[:1]
    pipeline, found = make_pipeline(case), list[Evaluated]()
    for report in pipeline.run(batches, evaluate=Evaluating(2, data)):
        found += report.evaluated
    found += pipeline.evaluated()
    assert [e.version for e in found] == [2, 4, 6]
    parts = make_pipeline(case)
    for each in found:
        list(parts.run(batches[parts.batches : each.version]))
        here = parts.evaluate(data)
        assert here is not None
        assert each.loss == here[0] == loss_of(case, parts.state_dict(), data)


def ends_of(pipeline: Pipeline, batches: list) -> dict[str, torch.Tensor]:
    list(pipeline.run(batches))
    return pipeline.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_flush_after_it_goes_on_from_the_weights(name: str) -> None:
    case = case_named(name, 7)
    batches, first = make_batches(case), case_named(name, 4)
    pipeline = make_pipeline(case)
    list(pipeline.run(batches[:4]))
    assert_equal_tensors(
        pipeline.state_dict(), expected(first, options=KINDS[name].options).weights, "weights before the switch"
    )
    pipeline.switch(prove("1f1b", case.depth, case.m))
    taken = [snapshot for snapshot in snapshots_of(first, 4, make_pipeline(first)) if snapshot.batch == 4]
    other = make_pipeline(Case("1f1b", case.depth, case.m, case.model, case.optimizer, rate=case.rate))
    other.load(Kept(taken))
    wanted = loss_of(case, pipeline.state_dict(), [batches[4]])
    (report,) = pipeline.run([batches[4]])
    assert report.loss == wanted
    list(other.run([batches[4]]))
    assert_equal_tensors(ends_of(pipeline, batches[5:]), ends_of(other, batches[5:]), "after the switch")


@pytest.mark.parametrize("name", NAMES)
def test_the_first_batch_after_a_write_reads_what_was_written(name: str) -> None:
    case = case_named(name, 6)
    batches, pipeline = make_batches(case), make_pipeline(case)
    list(pipeline.run(batches[:4]))
    written = {key: 0.5 * value for key, value in pipeline.state_dict().items()}
    pipeline.load_state_dict(written)
    (report,) = pipeline.run([batches[4]])
    assert report.loss == loss_of(case, written, [batches[4]])


def test_it_cannot_go_back_without_its_correction() -> None:
    case = case_named("2bw-ahead", 2)
    pipeline = make_pipeline(case)
    list(pipeline.run(make_batches(case)))
    pipeline.switch(prove("1f1b", case.depth, case.m))
    with pytest.raises(ConfigError, match="correction"):
        pipeline.switch(prove("2bw-ahead", case.depth, case.m))


# --- the equations of docs/asynchronous.md ----------------------------------------------------------------------------

LR, WD, MU, B1, B2, EPS, SINK, DROP = 0.05, 0.1, 0.9, 0.9, 0.99, 1e-8, 0.1, 0.004
Made = tuple[torch.Tensor, torch.Tensor]
"""The step of an update and u, both in units of the rate."""


class Equations:
    """The updates of one parameter, and their u; n counts them from 1, w is the weight before."""

    def __init__(self, a: float | None, b: float | None) -> None:
        self.a, self.b, self.q = a, b, 1.0
        self.v = self.m = self.s = torch.zeros((), dtype=torch.double)

    def sgd(self, _n: int, g: torch.Tensor, w: torch.Tensor) -> Made:
        return g + WD * w, g if self.a is None or self.b is None else (self.a + self.b) * g

    def momentum(self, n: int, g: torch.Tensor, w: torch.Tensor) -> Made:
        self.v = g + WD * w if n == 1 else MU * self.v + (1 - SINK) * (g + WD * w)
        if self.a is not None and self.b is not None:
            return self.v, self.a * self.v + self.b * g * (1 - SINK) / (1 - MU)
        return self.v, MU * self.v + (1 - SINK) * g

    def nesterov(self, _n: int, g: torch.Tensor, w: torch.Tensor) -> Made:
        self.v = MU * self.v + g + WD * w
        if self.a is not None and self.b is not None:
            return g + WD * w + MU * self.v, self.a * self.v + self.b * g / (1 - MU)
        return g + WD * w + MU * self.v, g + MU * (MU * self.v + g)

    def adam(self, n: int, g: torch.Tensor, w: torch.Tensor, coupled: float = WD) -> Made:
        g_decayed = g + coupled * w
        self.m, self.s = B1 * self.m + (1 - B1) * g_decayed, B2 * self.s + (1 - B2) * g_decayed**2
        r = (self.s / (1 - B2**n)).sqrt() + EPS
        if self.a is not None and self.b is not None:
            u = (self.a * self.m / (1 - B1**n) + self.b * g) / r
        else:
            u = (B1 * self.m + (1 - B1) * g) / (1 - B1 ** (n + 1)) / r
        return self.m / (1 - B1**n) / r, u

    def adamw(self, n: int, g: torch.Tensor, w: torch.Tensor) -> Made:
        step, u = self.adam(n, g, w, coupled=0.0)
        return step + WD * w, u

    def nadam(self, n: int, g: torch.Tensor, w: torch.Tensor) -> Made:
        _, u = self.adam(n, g, w)
        r, decayed = (self.s / (1 - B2**n)).sqrt() + EPS, g + WD * w
        now, mu1, mu2 = (B1 * (1 - 0.5 * 0.96 ** ((n + j) * DROP)) for j in (0, 1, 2))
        self.q *= now
        q1 = self.q * mu1
        step = (mu1 * self.m / (1 - q1) + (1 - now) * decayed / (1 - self.q)) / r
        if self.a is None:
            u = ((1 - mu1) * g / (1 - q1) + mu2 * (B1 * self.m + (1 - B1) * g) / (1 - q1 * mu2)) / r
        return step, u


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=LR, weight_decay=WD),
    "momentum": partial(torch.optim.SGD, lr=LR, weight_decay=WD, momentum=MU, dampening=SINK),
    "nesterov": partial(torch.optim.SGD, lr=LR, weight_decay=WD, momentum=MU, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=LR, weight_decay=WD, betas=(B1, B2), eps=EPS),
    "adamw": partial(torch.optim.AdamW, lr=LR, weight_decay=WD, betas=(B1, B2), eps=EPS),
    "nadam": partial(torch.optim.NAdam, lr=LR, weight_decay=WD, betas=(B1, B2), eps=EPS, momentum_decay=DROP),
}


@pytest.mark.parametrize("options", [{}, {"a": 0.45, "b": 0.053, "horizon": 1.5}], ids=["again", "a and b"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predictions_are_those_of_the_equations(name: str, options: dict[str, float]) -> None:
    """Of weights with decay: what is coupled is in the moments alone, what is decoupled nowhere."""
    model, data = make_model(), make_data(5)
    pipeline = pipeline_of_model(model, OPTIMIZERS[name], penstock.method("2bw-ahead", **options))
    list(pipeline.run(data))
    plain = make_model()
    weights = {key: p.detach().clone() for key, p in plain.named_parameters()}
    rules = {key: Equations(options.get("a"), options.get("b")) for key in weights}
    points = [dict(weights)]
    for n, (x, y) in enumerate(data, 1):
        read = {key: p.detach().requires_grad_() for key, p in points[max(n - 2, 0)].items()}
        loss = torch.nn.functional.mse_loss(torch.func.functional_call(plain, read, (x,)), y)
        points.append({})
        for (key, w), g in zip(weights.items(), torch.autograd.grad(loss, list(read.values())), strict=True):
            step, u = getattr(rules[key], name)(n, g, w)
            weights[key] = w - LR * step
            points[-1][key] = weights[key] - options.get("horizon", 1.0) * LR * u
    torch.testing.assert_close(pipeline.state_dict(), weights, rtol=1e-6, atol=1e-8)  # NAdam has a number in float32
