"""Optimizers and schedulers that exist already are refused at once, with the functions to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import penstock
from penstock.errors import CapabilityError, ConfigError
from penstock.weights.optim.optimizer_factory import refuse_instances


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


OPTIMIZERS: dict[str, torch.optim.Optimizer] = {
    "defaults": torch.optim.AdamW(parameters()),
    "settings": torch.optim.AdamW(parameters(), lr=0.02, betas=(0.8, 0.9), weight_decay=0.1),
    "tensor": torch.optim.Adam(parameters(), lr=torch.tensor(0.5), amsgrad=True),
    "sgd": torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_function_that_is_shown_makes_the_same_optimizer(name: str) -> None:
    made = OPTIMIZERS[name]
    with pytest.raises(ConfigError, match="every stage needs one of its own") as refused:
        refuse_instances(made, None)
    again = eval(str(refused.value).rpartition("optimizer=")[2], {"torch": torch})(parameters())
    assert type(again) is type(made)
    assert repr(again.defaults) == repr(made.defaults).replace("tensor(0.5000)", "0.5")


def test_optimizers_with_groups_and_schedulers() -> None:
    several = torch.optim.SGD([{"params": parameters()}, {"params": parameters(), "lr": 1.0}], lr=0.1)
    with pytest.raises(ConfigError, match=r"SGD\(named, lr=0.1\) \(sort the pairs .* into 2 groups"):
        refuse_instances(several, None)
    with pytest.raises(ConfigError, match=r"lr_scheduler=lambda optimizer: StepLR\(optimizer, \.\.\.\)"):
        refuse_instances(None, lr_scheduler.StepLR(several, 3))


@pytest.mark.parametrize("given", ["scheduler", "factory"])
def test_a_scheduler_with_a_metric_is_stepped_between_runs(given: str) -> None:
    """A second epoch that is no better halves the rate, as the message says to write it."""

    def plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.ReduceLROnPlateau:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)

    def make(scheduler: Any) -> penstock.Pipeline:
        return penstock.Pipeline(
            [nn.Linear(2, 2), nn.Linear(2, 2)], "1f1b", stages=2, microbatches=2, loss=F.mse_loss,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1), lr_scheduler=scheduler,
        )  # fmt: skip

    with pytest.raises((ConfigError, CapabilityError), match="it between two runs"):
        make(plateau if given == "factory" else plateau(torch.optim.SGD(parameters(), lr=0.1)))
    pipeline, loader = make(None), [(torch.ones(4, 2), torch.ones(4, 2))]
    plateaus = [plateau(optimizer) for optimizer in pipeline.optimizers().values()]
    for _ in range(2):
        list(pipeline.run(loader))
        mean, _ = pipeline.evaluate(loader) or (0.0, 0.0)
        for each in plateaus:
            each.step(mean)
    assert {o.param_groups[0]["lr"] for o in pipeline.optimizers().values()} == {0.05}


def test_a_first_script_hears_of_all_at_once() -> None:
    """A model without an example, an optimizer and a scheduler that exist; each attempt costs a reader."""

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    optimizer = torch.optim.AdamW(parameters(), lr=0.01)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, 60)
    with pytest.raises(ConfigError) as refused:
        penstock.Pipeline(
            Whole(), "2bw", stages=2, microbatches=4, loss=F.mse_loss, optimizer=optimizer, lr_scheduler=scheduler
        )  # type: ignore[arg-type]
    for said in (
        "Whole is a whole model, and is divided by running its forward on an example",
        "optimizer=lambda named: torch.optim.AdamW(named, lr=",
        "lr_scheduler=lambda optimizer: OneCycleLR(optimizer, ...)",
    ):
        assert said in str(refused.value)
