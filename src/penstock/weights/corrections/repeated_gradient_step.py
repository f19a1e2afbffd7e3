"""The step that an optimizer would make if its last gradient came again.

With a gradient g, momentum as a mean is m <- beta m + (1 - beta) g, and the step is eta m over the root of the second
moment. The step expected next, before its gradient is known, is taken as eta (a m + b g) over the same root, with m and
g after the update. By default the last gradient comes again, a = beta, b = 1 - beta:

    SGD       mu v + (1 - dampening) g;  with Nesterov's momentum  mu^2 v + (1 + mu) g
    Adam(W)   (beta m + (1 - beta) g) / (1 - beta^(n+1)), after n updates
    NAdam     mu'' beta m / (1 - p'') + ((1 - mu') / (1 - p') + mu'' (1 - beta) / (1 - p'')) g, where mu', mu'' are
              the next two of its momenta and p', p'' the products of all up to them
    Adan      (beta1 m + (1 - beta1) g) / (1 - beta1^(n+1)) + beta2^2 d / (1 - beta2^(n+1)): its next difference of
              gradients is zero

If a and b are given, m is the mean without its bias: m / (1 - beta^n), for SGD v (1 - mu) / (1 - dampening), in units
of what a constant gradient makes of the step; Adan's differences are left out. The second moment is that of the last
step, with its bias correction. Decoupled weight decay is not part of the step; coupled decay is, as far as m has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer

from penstock.errors import CapabilityError
from penstock.weights.optim.optimizer_adapters import Joined, name_of, optimizer_of
from penstock.weights.updates.parameter_change import Step

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
