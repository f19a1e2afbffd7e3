"""Passes on predicted weights: W plus the expected change by the next updates.

A velocity is what an update with a rate of 1 subtracts if gradients stay as they are: of SGD with momentum, also with
Nesterov's, its buffer v; of Adam and AdamW m' / (sqrt(v') + eps), with m' = m / (1 - beta1^n), v' = v / (1 - beta2^n)
after n updates; of Muon the orthogonalised buffer (`muon_direction`). Decoupled weight decay is not part of it. It is
zero before the first update. An optimizer may step some groups of its parameters as Muon does, others as AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.errors import CapabilityError
from penstock.verify.reference.muon import muon_direction
from penstock.verify.reference.stage import ReferenceReading, ReferenceStage, Weights


class ReferencePrediction(ReferenceReading):
    """W_hat = W - (horizon * lr) * velocity, where W is the newest version and lr the rate of the next update.

    Args:
        forward: how many updates ahead forwards predict.
        backward: how many updates ahead backwards predict; None if they do not.
        stash: backwards that do not predict read the weights of their forward, not the newest ones.
        bias: "adam" for the velocity above; "paper" for XPipe's, in which n is 1 in both corrections.
    """

    def __init__(self, forward: float, backward: float | None, stash: bool = False, bias: str = "adam") -> None:
        self.horizon, self.back, self.stash, self.bias = forward, backward, stash, bias
        self.repeats = stash and backward is None
        self.ahead: list[Weights] = []  # per version, what forwards predict from it
        self.next: Weights = {}  # what backwards predict from the newest version

    def on_version(self, stage: ReferenceStage) -> None:
        """Predict from the newest version."""
        self.ahead.append(self.predict(stage, self.horizon))
        if self.back is not None:
            self.next = self.predict(stage, self.back)

    def read(self, stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the prediction from the version, and for the backward that from the newest one, or the newest."""
        if self.back is not None:
            return self.ahead[version], self.next
        return self.ahead[version], None if self.stash else stage.versions[-1]

    def predict(self, stage: ReferenceStage, horizon: float) -> Weights:
        """Return the prediction from the newest weights."""
        result = {}
        groups = [] if stage.optimizer is None else stage.optimizer.param_groups
        rates = {p: stage.rate(initial) for g, initial in zip(groups, stage.rates, strict=True) for p in g["params"]}
        for name, parameter in stage.newest.items():
            assert stage.optimizer is not None
            v = velocity(stage.optimizer, parameter, self.bias)
            w = stage.versions[-1][name]
            result[name] = w if v is None else w - (horizon * rates[parameter]) * v
        return result


class LastChange(ReferenceReading):
    """W_hat = W + horizon * (the change by the last update): the weight form of linear weight prediction.

    Args:
        forward: how many updates ahead forwards predict.
        stash: backwards read the weights that their forward read, not the newest ones.
    """

    def __init__(self, forward: float, stash: bool) -> None:
        self.horizon, self.stash, self.repeats = forward, stash, stash
        self.ahead: list[Weights] = []
        self.change: Weights | None = None

    def on_version(self, stage: ReferenceStage) -> None:
        """Predict from the newest version."""
        newest = stage.versions[-1]
        if stage.made:
            self.change = {name: w - stage.versions[-2][name] for name, w in newest.items()}
        change = self.change
        self.ahead.append(newest if change is None else {n: w + self.horizon * change[n] for n, w in newest.items()})

    def read(self, stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the prediction from the version, and for the backward the same or the newest version."""
        return self.ahead[version], None if self.stash else stage.versions[-1]


def check_velocity(optimizer: Optimizer) -> None:
    """Check that the velocity of an optimizer is defined.

    Raises:
        CapabilityError: it is neither SGD with momentum nor Adam nor AdamW nor Muon, alone or with AdamW.
    """
    muon = [group for group in optimizer.param_groups if _is_muon(group)]
    others = [group for group in optimizer.param_groups if not _is_muon(group)]
    fits = isinstance(optimizer, SGD | Adam | AdamW) or (muon and all("betas" in group for group in others))
    if not fits or any(group.get("momentum") == 0 or group.get("amsgrad") for group in optimizer.param_groups):
        raise CapabilityError(
            f"{type(optimizer).__name__} has no velocity to predict weights from: use SGD with momentum, Adam, AdamW "
            "(without amsgrad) or Muon"
        )


def _is_muon(group: Mapping[str, Any]) -> bool:
    return "ns_coefficients" in group


def velocity(optimizer: Optimizer, parameter: nn.Parameter, bias: str) -> Tensor | None:
    """Return the velocity of one parameter after the updates made so far; None before the first one."""
    state = optimizer.state.get(parameter)
    if not state:
        return None
    (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    if _is_muon(group):
        return muon_direction(state["momentum_buffer"], group)
    if "betas" not in group:
        buffer = state["momentum_buffer"]
        assert isinstance(buffer, Tensor)
        return buffer.clone()
    n = float(state["step"]) if bias == "adam" else 1.0
    beta1, beta2 = group["betas"]
    mean, square = state["exp_avg"] / (1.0 - beta1**n), state["exp_avg_sq"] / (1.0 - beta2**n)
    return torch.as_tensor(mean / (square.sqrt() + group["eps"]))
