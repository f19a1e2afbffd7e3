"""Optimizers and schedulers that exist already are refused at once, with lines that make what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

import penstock
from penstock.errors import CapabilityError, ConfigError
from penstock.weights.optim.instance_instead_of_factory import refuse_instances


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def code_of(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """What the lines of the message define; the pipeline itself is left out."""
    with pytest.raises(ConfigError) as refused:
        refuse_instances(optimizer, scheduler)
    names: dict[str, Any] = {"torch": torch, "halved": halved}
    for line in str(refused.value).splitlines()[1:]:
        if not line.strip().startswith("pipeline = "):
            exec(line.strip(), names)
    return names


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "defaults": lambda p: torch.optim.AdamW(p),
    "settings": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1),
    "tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.5), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.25, total_steps=60),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7, eta_min=0.01),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=3),
    "linear": lambda o: lr_scheduler.LinearLR(o, start_factor=0.5, total_iters=4),
    "one-cycle in full": lambda o: lr_scheduler.OneCycleLR(
        o,
        0.25,
        10,
        pct_start=0.25,
        anneal_strategy="linear",
        base_momentum=0.5,
        max_momentum=0.75,
        div_factor=5.0,
        final_div_factor=100.0,
        three_phase=True,
    ),
    "one-cycle without momentum": lambda o: lr_scheduler.OneCycleLR(
        o, 0.25, epochs=2, steps_per_epoch=5, cycle_momentum=False
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(
        o, 0.1, 0.5, step_size_up=3, step_size_down=2, mode="exp_range", gamma=0.9, base_momentum=0.3, max_momentum=0.6
    ),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2, eta_min=0.001),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=2.0),
    "constant": lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.75),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=5, anneal_strategy="linear"),
    "a function": lambda o: lr_scheduler.LambdaLR(o, halved),
    "a product": lambda o: lr_scheduler.MultiplicativeLR(o, halved),
    "warm-up and cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.1, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
}


def halved(update: int) -> float:
    return 0.5**update


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_line_makes_the_same_optimizer(name: str) -> None:
    made = OPTIMIZERS[name](parameters())
    again = code_of(made, None)["make_optimizer"](parameters())
    assert type(again) is type(made)
    assert repr(again.defaults) == repr(made.defaults).replace("tensor(0.5000)", "0.5")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_both_are_refused_at_once_and_the_lines_make_the_same_rates(name: str) -> None:
    made = OPTIMIZERS["sgd"](parameters())
    names = code_of(made, SCHEDULERS[name](made))
    made, again = OPTIMIZERS["sgd"](parameters()), names["make_optimizer"](parameters())
    rates: list[list[tuple[float, float]]] = []
    for optimizer, scheduler in ((made, SCHEDULERS[name](made)), (again, names["make_scheduler"](again))):
        rates.append([])
        for _ in range(8):
            rates[-1].append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
            optimizer.step()
            scheduler.step()
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def test_a_scheduler_of_the_script_is_found_by_its_optimizer() -> None:
    """It was given to nobody, so its steps would reach nobody."""
    optimizer = OPTIMIZERS["sgd"](parameters())
    scheduler = SCHEDULERS["one-cycle"](optimizer)
    names = code_of(optimizer, None)
    assert isinstance(names["make_scheduler"](OPTIMIZERS["sgd"](parameters())), type(scheduler))
    other = OPTIMIZERS["sgd"](parameters())
    assert "make_scheduler" not in code_of(other, None)
    assert "make_scheduler" not in code_of(other, lambda optimizer: optimizer)


def test_of_schedulers_in_one_another_the_outer_one_is_found() -> None:
    optimizer = OPTIMIZERS["sgd"](parameters())
    scheduler = SCHEDULERS["warm-up and cosine"](optimizer)
    names = code_of(optimizer, None)
    assert isinstance(names["make_scheduler"](OPTIMIZERS["sgd"](parameters())), type(scheduler))


class Warmed(LRScheduler):
    """Keeps its argument under another name."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: int = 5) -> None:
        self._warm = updates
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [0.1 * min(1.0, self.last_epoch / self._warm) for _ in self.base_lrs]


def test_what_a_scheduler_of_ones_own_keeps_elsewhere_is_left_open() -> None:
    with pytest.raises(ConfigError, match=r"lambda optimizer: Warmed\(optimizer, updates=\.\.\.\)"):
        refuse_instances(None, Warmed(OPTIMIZERS["sgd"](parameters()), 7))


def test_rates_of_several_groups_are_a_list() -> None:
    optimizer = torch.optim.SGD([{"params": parameters()}, {"params": parameters(), "lr": 1.0}], lr=0.1, momentum=0.5)
    with pytest.raises(ConfigError, match=r"OneCycleLR\(optimizer, max_lr=\[0.1, 0.2\], total_steps=9\)"):
        refuse_instances(None, lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], 9))


@pytest.mark.parametrize("given", ["optimizer", "scheduler", "both", "factory"])
def test_what_is_said_of_a_scheduler_with_a_metric_works(given: str) -> None:
    """The lines step it between two runs, and halve the rate after a second epoch that is no better."""
    optimizer = OPTIMIZERS["sgd"](parameters())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)
    wanted = {"optimizer": lambda named: OPTIMIZERS["sgd"]([p for _, p in named]), "lr_scheduler": None}
    if given in ("optimizer", "both"):
        wanted["optimizer"] = optimizer
    if given in ("scheduler", "both"):
        wanted["lr_scheduler"] = scheduler
    if given == "factory":
        wanted["lr_scheduler"] = lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.99)
    rest = {"method": "1f1b", "stages": 2, "microbatches": 2, "loss": F.mse_loss}
    with pytest.raises((ConfigError, CapabilityError), match="it between two runs") as refused:
        penstock.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], **{**rest, **wanted})
    lines = [line.strip() for line in str(refused.value).splitlines()[1:]]
    names: dict[str, Any] = {"torch": torch, "penstock": penstock, "blocks": [nn.Linear(2, 2), nn.Linear(2, 2)], **rest}
    names["loader"] = names["validation_loader"] = [(torch.ones(4, 2), torch.ones(4, 2))]
    names["optimizer"] = wanted["optimizer"]
    whole = "blocks, method=method, stages=stages, microbatches=microbatches, loss=loss"
    if not any(line.startswith("pipeline = ") for line in lines):
        lines.insert(0, "pipeline = penstock.Pipeline(..., optimizer=optimizer)")
    exec("\n".join(lines).replace("Pipeline(...", f"Pipeline({whole}"), names)
    exec("\n".join(line for line in lines if not line.startswith(("pipeline = ", "plateaus = "))), names)
    assert {o.param_groups[0]["lr"] for o in names["pipeline"].optimizers().values()} == {0.05}


def test_a_scheduler_alone() -> None:
    names = code_of(lambda named: None, SCHEDULERS["step"](OPTIMIZERS["sgd"](parameters())))
    assert "make_optimizer" not in names
    assert names["make_scheduler"](OPTIMIZERS["sgd"](parameters())).step_size == 3


def test_what_cannot_be_known_is_left_open() -> None:
    optimizer = torch.optim.SGD([{"params": parameters()}, {"params": parameters(), "lr": 1.0}], lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    with pytest.raises(
        ConfigError, match=r"SGD\(named, lr=0.1\)  # sort the pairs \(name, parameter\) into 2 groups"
    ) as said:
        refuse_instances(optimizer, scheduler)
    assert "LambdaLR(optimizer, lr_lambda=...)" in str(said.value)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x)) if x.sum() > 0 else x
        return found


def test_a_first_script_hears_of_all_at_once() -> None:
    """A model without an example, an optimizer and a scheduler that exist; each attempt costs a reader."""
    model = Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, 60)
    with pytest.raises(ConfigError) as refused:
        penstock.Pipeline(
            model, "2bw", stages=2, microbatches=4, loss=F.mse_loss, optimizer=optimizer, lr_scheduler=scheduler
        )  # type: ignore[call-overload]
    said = str(refused.value)
    assert "Whole is a whole model, and is divided by running its forward on an example" in said
    assert "make_optimizer = lambda named: torch.optim.AdamW(named, lr=0.01)" in said
    assert (
        "make_scheduler = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)"
        in said
    )
    assert "pipeline = penstock.Pipeline(..., optimizer=make_optimizer, lr_scheduler=make_scheduler)" in said
