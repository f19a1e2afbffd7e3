"""Weights with a constant delay that are read ahead of the updates that are missing (`2bw-ahead`, `3bw-ahead`).

Under 2BW the gradient that makes W(t+1) of W(t) is taken at W(t-1). Here it is taken at a prediction of W(t), which is
written once per update, where the last gradient still lies in its buffer, and serves all microbatches of a batch; under
3bw, where it is taken at W(t-2), at one that was made two updates before. After update t with the gradient g, eta being
the rate of the next update, and h the horizon, by default the delay:

    repeat   W^ = W(t+1) - h eta (a m + b g) / root   the step if g came again (`repeated_gradient`)
    motion   W^ = W(t+1) + h (W(t+1) - W(t))          the last motion once more, whatever the optimizer

Where the step is not elementwise (Muon's matrices) `repeat` takes the motion, which needs no second orthogonalization.
Updates, averages, evaluations and checkpoints have W. A skipped update predicts nothing: W^ = W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer

from penstock.errors import CapabilityError
from penstock.weights.corrections.base import Correction, Corrector, StagePlace
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.optimizer_adapters import Joined, name_of, optimizer_of
from penstock.weights.updates.parameter_change import Step


@dataclass(frozen=True)
class ReadingAhead:
    """Settings of predictions by the delay of a method.

    Args:
        motion: repeat the last motion of the weights, not the last gradient.
        horizon: the number of updates to predict, at least 0; the delay if None.
        a, b: weights of the mean of gradients and of the last gradient, both or none; by default the last gradient
            comes again.
    """

    motion: bool = False
    horizon: float | None = None
    a: float | None = None
    b: float | None = None
    name: str = "2bw-ahead"

    def refuses(self, _precision: torch.dtype | None, _recompute: str) -> str | None:
        """Return None: every precision and recompute mode is supported."""
        return None

    def on(self, layout: Layout, place: StagePlace) -> _ReadingAheadOnStage:
        """Create the corrector of a stage."""
        return _ReadingAheadOnStage(self, layout, place)


def prediction_of(correction: Correction | None, delay: int) -> list[float | None] | None:
    """Return which prediction passes read in place of versions, as numbers; None if they read versions.

    Args:
        correction: of a method.
        delay: of its version rule.
    """
    if not isinstance(correction, ReadingAhead):
        return None
    horizon = delay if correction.horizon is None else correction.horizon
    return [float(correction.motion), float(horizon), correction.a, correction.b]


class _ReadingAheadOnStage(Corrector):
    reads_ahead = True

    def __init__(self, wanted: ReadingAhead, layout: Layout, place: StagePlace) -> None:
        super().__init__(layout, place)
        self._wanted, self._horizon = wanted, place.delay if wanted.horizon is None else wanted.horizon
        self._chosen = None if wanted.a is None or wanted.b is None else (wanted.a, wanted.b)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept every optimizer for the last motion, elementwise ones and Muon for the last gradient."""
        if not self._wanted.motion:
            check_repeatable(optimizer)

    def looks_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether predictions need the weights before an update."""
        parts = optimizer.parts if isinstance(optimizer, Joined) else (optimizer,)
        return self._wanted.motion or not all(map(is_elementwise, parts))

    def ahead(self, step: Step) -> Tensor:
        """Return the values that passes read after an update."""
        horizon = self._horizon
        if self._wanted.motion or not is_elementwise(optimizer_of(step.optimizer, step.parameter)):
            return step.after + horizon * (step.after - step.before)
        return step.after - (horizon * step.rate(1)) * repeated_step(step, self._chosen)


Weights = tuple[float, float]
"""a and b, the weights of the mean of gradients and of the last gradient."""

_KNOWN = (SGD, Adam, AdamW, NAdam)


def check_repeatable(optimizer: Optimizer) -> None:
    """Raise an error if the next step of an optimizer cannot be told from its state and its last gradient.

    Muon passes: what it steps is not elementwise, so its matrices read their last motion instead.

    Raises:
        CapabilityError: it cannot.
    """
    if isinstance(optimizer, Joined):
        for part in optimizer.parts:
            check_repeatable(part)
        return
    name = name_of(optimizer)
    if not (is_elementwise(optimizer) or isinstance(optimizer, Muon)):
        raise CapabilityError(
            "2bw-ahead and 3bw-ahead repeat the last gradient of SGD, Adam, AdamW, NAdam, Adan and what goes with "
            f"Muon, not of {name}; use their option motion=1, which repeats the last motion of the weights under any "
            "optimizer"
        )
    if any(group.get("maximize") or group.get("amsgrad") for group in optimizer.param_groups):
        raise CapabilityError(
            "2bw-ahead and 3bw-ahead do not repeat gradients under maximize or amsgrad; turn them off"
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the last gradient can be repeated element by element."""
    return type(optimizer) in _KNOWN or name_of(optimizer) == "Adan"


def repeated_step(step: Step, chosen: Weights | None) -> Tensor:
    """Return the next step of a parameter in units of the learning rate, to be subtracted.

    Args:
        step: the last one, of an optimizer that `check_repeatable` accepts.
        chosen: a and b; None if the last gradient comes again.
    """
    optimizer = optimizer_of(step.optimizer, step.parameter)
    state, group = step.optimizer.state.get(step.parameter, {}), step.group
    if isinstance(optimizer, SGD):
        return _of_sgd(state.get("momentum_buffer"), group, step.gradient, chosen)
    if chosen is not None:
        a, b = _unbiased(state, group, chosen)
    elif isinstance(optimizer, NAdam):
        a, b = _weights_of_nadam(state, group)
    else:
        a, b = _weights_of_adam(state, group)
    expected: Tensor = a * state["exp_avg"] + b * step.gradient
    if "exp_avg_diff" in state and chosen is None:
        beta = group["betas"][1]
        expected = expected + beta * beta / (1.0 - beta ** (int(state["step"]) + 1)) * state["exp_avg_diff"]
    return expected / _root(state, group)


def _of_sgd(buffer: Tensor | None, group: Mapping[str, Any], gradient: Tensor, chosen: Weights | None) -> Tensor:
    mu, taken = group["momentum"], 1.0 - group["dampening"]
    if buffer is None:  # without momentum the mean is the last gradient
        return gradient if chosen is None else (chosen[0] + chosen[1]) * gradient
    if chosen is not None:
        a, b = chosen[0], chosen[1] * taken / (1.0 - mu)
    elif group["nesterov"]:
        a, b = mu * mu, 1.0 + mu
    else:
        a, b = mu, taken
    expected: Tensor = a * buffer + b * gradient
    return expected


def _weights_of_adam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Weights:
    beta = group["betas"][0]
    bias = 1.0 - beta ** (int(state["step"]) + 1)
    return beta / bias, (1.0 - beta) / bias


def _weights_of_nadam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Weights:
    n, beta, decay = int(state["step"]), group["betas"][0], group["momentum_decay"]
    first, second = (beta * (1.0 - 0.5 * 0.96 ** ((n + j) * decay)) for j in (1, 2))
    product = float(state["mu_product"]) * first
    of_mean = second / (1.0 - product * second)
    return of_mean * beta, (1.0 - first) / (1.0 - product) + of_mean * (1.0 - beta)


def _unbiased(state: Mapping[str, Any], group: Mapping[str, Any], chosen: Weights) -> Weights:
    return chosen[0] / (1.0 - group["betas"][0] ** int(state["step"])), chosen[1]


def _root(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return what the last step was divided by."""
    beta = group["betas"][-1]
    corrected: Tensor = state["exp_avg_sq"] / (1.0 - beta ** int(state["step"]))
    root: Tensor = torch.sqrt(corrected) + group["eps"]
    return root
