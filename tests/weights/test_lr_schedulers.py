"""torch's learning-rate schedulers on pipelines: the same rates at the same updates as in a plain loop."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from penstock import Pipeline, make_schedule
from penstock.errors import CapabilityError, ConfigError
from penstock.weights.updates.lr_scheduler_table import ScheduledSettings
from support.scheduled_rates import OPTIMIZERS, SCHEDULERS, STAGES, M, loss, make_batches, make_blocks, make_pipeline
from support.snapshots import Kept


def train_plainly(optimizer: str, scheduler: str, delay: int) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """A loop in plain torch, whose gradients are those of the weights `delay` updates before."""
    model = nn.Sequential(*make_blocks())
    made = [OPTIMIZERS[optimizer](list(block.named_parameters())) for block in model]
    plans = [SCHEDULERS[scheduler](each) for each in made]
    settings, versions = [], [[p.detach().clone() for p in model.parameters()]]
    for batch in make_batches():
        newest = [p.detach().clone() for p in model.parameters()]
        for parameter, old in zip(model.parameters(), versions[max(len(versions) - 1 - delay, 0)], strict=True):
            parameter.data.copy_(old)
        model.zero_grad()
        weight = sum(target.numel() for _, target in batch)
        for x, target in batch:
            (loss(model(x), target)[0] / M).backward()
        for parameter, new in zip(model.parameters(), newest, strict=True):
            parameter.data.copy_(new)
            parameter.grad *= M / weight
        settings.append([{k: v for k, v in g.items() if k != "params"} for o in made for g in o.param_groups])
        for each, plan in zip(made, plans, strict=True):
            each.step()
            plan.step()
        versions.append([p.detach().clone() for p in model.parameters()])
    return versions[-1], settings


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("method", "delay", "optimizer"), [("1f1b", 0, "adamw"), ("2bw", 1, "sgd")])
def test_a_pipeline_follows_a_scheduler_as_a_plain_loop_does(
    scheduler: str, method: str, delay: int, optimizer: str
) -> None:
    wanted, settings = train_plainly(optimizer, scheduler, delay)
    pipeline = make_pipeline(method, optimizer, scheduler)
    list(pipeline.run(make_batches()))
    found = pipeline.state_dict()
    torch.testing.assert_close([found[name] for name in sorted(found, key=_place)], wanted, rtol=2e-6, atol=2e-7)
    last = [group for o in pipeline.optimizers().values() for group in o.param_groups]
    for group, known in zip(last, settings[-1], strict=True):
        assert {key: group[key] for key in ("lr", "momentum", "betas") if key in group} == {
            key: known[key] for key in ("lr", "momentum", "betas") if key in known
        }


def _place(name: str) -> tuple[str, str]:
    return name.split(".")[0], {"weight": "0", "bias": "1"}[name.rsplit(".", 1)[1]]


@pytest.mark.parametrize("scheduler", ["one cycle", "cosine"])
def test_a_resumed_run_has_the_scheduler_where_it_was(scheduler: str) -> None:
    whole = make_pipeline("2bw", "sgd", scheduler)
    list(whole.run(make_batches()))
    first, second = (make_pipeline("2bw", "sgd", scheduler) for _ in range(2))
    list(first.run(make_batches()[:5]))
    second.load(Kept(first.snapshots()))
    list(second.run(make_batches()[5:]))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


def test_settings_may_be_asked_for_in_any_order() -> None:
    """Also after they were forgotten."""
    optimizer = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = ScheduledSettings(SCHEDULERS["cyclic"], optimizer)
        rates = [table.at(n)[0]["lr"] for n in range(3000)]
        assert [table.at(n)[0]["lr"] for n in (2999, 0, 1, 2500)] == [rates[n] for n in (2999, 0, 1, 2500)]
    assert len({round(rate, 9) for rate in rates}) == 3
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_a_momentum_that_comes_back_to_where_it_began_is_set() -> None:
    optimizer = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    table = ScheduledSettings(SCHEDULERS["cyclic"], optimizer)
    momenta = [table.at(n)[0].get("momentum", 0.9) for n in range(9)]
    wanted = []
    plain = OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))])
    scheduler = SCHEDULERS["cyclic"](plain)
    for _ in range(9):
        wanted.append(plain.param_groups[0]["momentum"])
        plain.step()
        scheduler.step()
    assert momenta == wanted


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_scheduler_stepped_in_the_loop_is_refused(method: str) -> None:
    pipeline = make_pipeline(method, "sgd", None)
    plans = [schedulers.ExponentialLR(o, 0.9) for o in pipeline.optimizers().values()]
    said = r"set from 0.02 to 0.018\d* during a run.*pass Pipeline\(lr_scheduler="
    with pytest.raises(ConfigError, match=said):  # noqa: PT012
        for _ in pipeline.run(make_batches()):
            for plan in plans:
                plan.step()


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (schedulers.ReduceLROnPlateau, "ReduceLROnPlateau needs a metric"),
        (lambda _: "cosine", "lr_scheduler returned str, not a scheduler of torch"),
    ],
)
def test_what_is_no_function_of_updates_is_refused(factory: Any, said: str) -> None:
    with pytest.raises(CapabilityError, match=said):
        Pipeline(
            make_blocks(),
            make_schedule("1f1b", STAGES, M),
            loss=loss,
            optimizer=OPTIMIZERS["sgd"],
            lr_scheduler=factory,
        )


def test_a_scheduler_that_exists_already() -> None:
    plan = schedulers.StepLR(OPTIMIZERS["sgd"]([("p", nn.Parameter(torch.zeros(2)))]), 3)
    said = r"(?s)lr_scheduler is StepLR of an optimizer that exists already.*lambda optimizer: .*StepLR\(optimizer"
    with pytest.raises(ConfigError, match=said):
        Pipeline(
            make_blocks(), make_schedule("1f1b", STAGES, M), loss=loss, optimizer=OPTIMIZERS["sgd"], lr_scheduler=plan
        )
    with pytest.raises(ConfigError, match="lr_scheduler must be a function, optimizer -> scheduler.*got 0.1"):
        Pipeline(
            make_blocks(), make_schedule("1f1b", STAGES, M), loss=loss, optimizer=OPTIMIZERS["sgd"], lr_scheduler=0.1
        )


@pytest.mark.parametrize("factory", [schedulers.StepLR, lambda update: 1 / (1 + update)], ids=["class", "of updates"])
def test_a_factory_of_schedulers_that_fails_is_named(factory: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Pipeline(
            make_blocks(),
            make_schedule("1f1b", STAGES, M),
            loss=loss,
            optimizer=OPTIMIZERS["sgd"],
            lr_scheduler=factory,
        )
    assert "LambdaLR(optimizer, function)" in caught.value.__notes__[0]
