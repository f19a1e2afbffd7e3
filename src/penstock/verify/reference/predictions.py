"""Passes on predicted weights: W plus the expected change by the next updates.

A velocity is what an update with a rate of 1 subtracts if gradients stay as they are: of SGD with momentum, also with
Nesterov's, its buffer v; of Adam and AdamW m' / (sqrt(v') + eps), with m' = m / (1 - beta1^n), v' = v / (1 - beta2^n)
after n updates; of Muon the orthogonalised buffer (`muon_direction`). Decoupled weight decay is not part of it. It is
zero before the first update. An optimizer may step some groups of its parameters as Muon does, others as AdamW.

2BW that reads ahead: each version is read as a prediction of the next one, made once, with its update.

Batch t is trained at P(t-1), in place of W(t-1). Where an update has made W(t) with the gradient g:

    P(t) = W(t) - (horizon * lr) * u      lr: the rate of the next update, u: its step if its gradient were g again
    P(t) = W(t) + horizon * (W(t) - W(t-1))    with `motion`, and for matrices that Muon steps

otherwise (the first version, skipped updates) P(t) = W(t). u is, for each optimizer, with its state after the update,
its n-th (docs/asynchronous.md has the same equations):

    SGD     v' = mu v + (1 - dampening) g;  u = v', with Nesterov's momentum g + mu v', without momentum g
    Adam    u = (b1 m + (1 - b1) g) / (1 - b1^(n+1)) / r,  r = sqrt(s / (1 - b2^n)) + eps;  so does AdamW
    NAdam   u = ((1 - mu1) g / (1 - q1) + mu2 (b1 m + (1 - b1) g) / (1 - q2)) / r,
            mu_j = b1 (1 - 0.96^((n+j) decay) / 2), q1 = q mu1, q2 = q1 mu2, q the product of the momenta so far
    Adan    u = ((b1 m + (1 - b1) g) / (1 - b1^(n+1)) + b2 b2 d / (1 - b2^(n+1))) / r, with b3 in place of b2 in r
    a, b    u = (a m / (1 - b1^n) + b g) / r;  SGD: u = a v + b g (1 - dampening) / (1 - mu), without momentum (a + b) g
    Muon    its matrices: P(t) = W(t) + h (W(t) - W(t-1)), with a and b, too; the rest as under AdamW

g is the gradient without decay of weights. Coupled decay, g + wd W, is in v, m and s, which have it, and is not added
to the g that comes again; decoupled decay is nowhere in u. Terms of m (or v) are collected, and those of g, before
they are multiplied.
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


class Ahead(ReferenceReading):
    """Forwards and backwards of a batch read one prediction.

    Args:
        motion, horizon, a, b: as above.
    """

    def __init__(self, motion: bool, horizon: float, a: float | None, b: float | None) -> None:
        self.motion, self.horizon, self.chosen = motion, horizon, None if a is None or b is None else (a, b)
        self.points: list[Weights] = []

    def on_version(self, stage: ReferenceStage) -> None:
        """Predict from the newest version."""
        now = stage.versions[-1]
        if not stage.made or stage.optimizer is None:
            self.points.append(now)
            return
        before, point = stage.versions[-2], {}
        names = {parameter: name for name, parameter in stage.newest.items()}
        for group, initial in zip(stage.optimizer.param_groups, stage.rates, strict=True):
            for parameter in group["params"]:
                name, g = names[parameter], parameter.grad
                if self.motion or "ns_steps" in group:
                    point[name] = now[name] + self.horizon * (now[name] - before[name])
                else:
                    u = _again(stage.optimizer.state.get(parameter, {}), group, g, self.chosen)
                    point[name] = now[name] - (self.horizon * stage.rate(initial)) * u
        self.points.append(point)

    def read(self, _stage: ReferenceStage, version: int) -> tuple[Weights, Weights | None]:
        """Return the prediction made with the version, for both passes."""
        return self.points[version], None


def _again(state: Mapping[str, Any], group: Mapping[str, Any], g: Tensor, chosen: tuple[float, float] | None) -> Tensor:
    """Return u."""
    if "betas" not in group:
        mu, share = group["momentum"], 1.0 - group["dampening"]
        if not mu:
            return g if chosen is None else sum(chosen) * g
        if chosen is not None:
            of_v, of_g = chosen[0], chosen[1] * share / (1.0 - mu)
        else:
            of_v, of_g = (mu * mu, 1.0 + mu) if group["nesterov"] else (mu, share)
        again: Tensor = of_v * state["momentum_buffer"] + of_g * g
        return again
    n, b1 = float(state["step"]), group["betas"][0]
    r = (state["exp_avg_sq"] / (1.0 - group["betas"][-1] ** n)).sqrt() + group["eps"]
    if chosen is not None:
        of_m, of_g = chosen[0] / (1.0 - b1**n), chosen[1]
    elif "momentum_decay" in group:
        mu1, mu2 = (b1 * (1.0 - 0.5 * 0.96 ** ((n + j) * group["momentum_decay"])) for j in (1, 2))
        q1 = float(state["mu_product"]) * mu1
        look = mu2 / (1.0 - q1 * mu2)
        of_m, of_g = look * b1, (1.0 - mu1) / (1.0 - q1) + look * (1.0 - b1)
    else:
        bias = 1.0 - b1 ** (n + 1)
        of_m, of_g = b1 / bias, (1.0 - b1) / bias
    u = of_m * state["exp_avg"] + of_g * g
    if "exp_avg_diff" in state and chosen is None:
        b2 = group["betas"][1]
        u = u + b2 * b2 / (1.0 - b2 ** (n + 1)) * state["exp_avg_diff"]
    found: Tensor = u / r
    return found
