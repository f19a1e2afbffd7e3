"""Models and optimizers of all kinds equal the reference; optimizers that cannot step a stage are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import CapabilityError
from support.cases import (
    BALANCE,
    METHODS,
    Case,
    Named,
    Outcome,
    Recording,
    as_outcome,
    assert_equal_tensors,
    assert_same,
    cut,
    expected,
    finish,
    make_batches,
    make_blocks,
    make_pipeline,
    mixed,
    token_loss,
    train,
    train_on_ranks,
    warm_up,
)
from support.own_methods import train_reference
from support.pool import Pool


@pytest.mark.slow
@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize(("model", "optimizer"), [("gpt", "adamw"), ("matrices", "muon"), ("mixed", "adafactor")])
def test_models_and_optimizers(method: str, model: str, optimizer: str) -> None:
    for depth, m in ((1, 2), (4, 3)):
        case = Case(method, depth, m, model, optimizer)
        assert_same(train(None, case), expected(case))


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_gpt_on_ranks(pool: Pool, method: str) -> None:
    case = Case(method, 4, 3, "gpt", "nadam")
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize("method", METHODS)
def test_scalar_loss_and_constant_rate(method: str) -> None:
    """A scalar is a mean over samples, so microbatches are weighted by their numbers, less what is ignored."""
    case = Case(method, 2, 3, loss="mean", rate=False, skips=())
    found = train(None, case)
    assert_same(found, expected(case))
    counted = [sum(len(y) * (y != -100).double().mean().item() for _, y in batch) for batch in make_batches(case)]
    assert [weight for _, _, weight in found.reports] == counted
    assert len(set(counted)) > 3


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
@pytest.mark.parametrize("skips", [(0,), (0, 1), (5,), (1, 3, 4)])
def test_batches_without_weight(method: str, skips: tuple[int, ...]) -> None:
    case = Case(method, 3, 2, skips=skips)
    found = train(None, case)
    assert_same(found, expected(case))
    assert [batch for batch, loss, _ in found.reports if loss is None] == list(skips)
    assert len(found.gradients) == 6 - len(skips)


def test_groups_with_their_own_rates() -> None:
    """A factory may divide the parameters; the schedule multiplies each group's rate."""
    case = Case("2bw", 3, 3, skips=(2,))
    recording = Recording(two_groups)
    pipeline, outcome = make_pipeline(case, optimizer=recording), Outcome()
    outcome.reports = [(r.batch, r.loss, r.weight) for r in pipeline.run(make_batches(case))]
    result = train_reference(
        *(cut(make_blocks("mixed"), BALANCE[3]), token_loss, make_batches(case)),
        method="2bw",
        optimizer=two_groups,
        rate=warm_up,
        divisor=case.divisor,
    )
    wanted = as_outcome(result)
    assert_same(finish(outcome, pipeline, recording), wanted)
    assert wanted.rates["head.weight"] == 4 * wanted.rates["head.bias"]


def two_groups(named: Named) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": 0.005, "weight_decay": 0.0}]
    for name, parameter in named:
        groups["bias" in name or "norm" in name]["params"].append((name, parameter))
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.02)


class OneGo(torch.optim.AdamW):
    """A class of its own may look at all parameters in one step, so it is never given some at a time."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.01, weight_decay=0.1)
        self.parameters_per_step: list[int] = []

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        self.parameters_per_step.append(sum(p.grad is not None for g in self.param_groups for p in g["params"]))
        return super().step(closure)


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_an_optimizer_class_of_one_s_own_steps_everything_at_once(method: str) -> None:
    case = Case(method, 1, 2)
    made: list[OneGo] = []

    def factory(named: Named) -> torch.optim.Optimizer:
        made.append(OneGo(named))
        return made[-1]

    pipeline = make_pipeline(case, optimizer=factory)
    list(pipeline.run(make_batches(case)))
    count = sum(len(list(b.parameters())) for b in mixed().values() if isinstance(b, nn.Module))
    assert made[0].parameters_per_step == [count] * 5  # one batch of six has no weight
    assert_equal_tensors(pipeline.state_dict(), expected(case).weights, "weights")


def leaving_out(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named[1:], lr=0.1)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda named: torch.optim.LBFGS([p for _, p in named]), "LBFGS needs a closure"),
        (leaving_out, r"left out 1 trained parameters, the first of them table\.weight"),
        (lambda named: "adam", "returned str, not a torch optimizer"),
    ],
)
def test_optimizers_that_are_refused(factory: Any, message: str) -> None:
    with pytest.raises(CapabilityError, match=message):
        make_pipeline(Case("2bw", 1, 1), optimizer=factory)
