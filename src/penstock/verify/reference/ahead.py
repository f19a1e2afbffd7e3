"""2BW that reads ahead: each version is read as a prediction of the next one, made once, with its update.

Batch t is trained at P(t-1), in place of W(t-1). Where an update has made W(t) with the gradient g:

    P(t) = W(t) - (horizon * lr) * u      lr: the rate of the next update, u: its step if its gradient were g again
    P(t) = W(t) + horizon * (W(t) - W(t-1))    with `motion`, and for matrices that Muon steps

otherwise (the first version, skipped updates) P(t) = W(t). u is, for each optimizer, with its state after the update,
its n-th, and with all decay of weights left out that is not in its momentum:

    SGD     v' = mu v + (1 - dampening) g; u = v', with Nesterov's momentum g + mu v', without momentum g
    Adam    (b1 m + (1 - b1) g) / (1 - b1^(n+1)) / r,   r = sqrt(s / (1 - b2^n)) + eps
    NAdam   ((1 - mu1) / (1 - q1) g + mu2 / (1 - q2) (b1 m + (1 - b1) g)) / r, mu_j = b1 (1 - 0.96^((n+j) decay) / 2),
            q1 = q mu1, q2 = q1 mu2, with q the product of all momenta so far
    Adan    ((b1 m + (1 - b1) g) / (1 - b1^(n+1)) + b2 (b2 d) / (1 - b2^(n+1))) / r, with b3 in place of b2 in r

If a and b are given, u = (a m / (1 - b1^n) + b g) / r, and a v + b g (1 - dampening) / (1 - mu) for SGD. Terms of m (or
v) are collected, and those of g, before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.verify.reference.stage import ReferenceReading, ReferenceStage, Weights


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
