"""Undoing an optimizer step by arithmetic: no copies, but roundings.

What a step does to a weight and its moments is solved for what they were before. Every operation rounds, so the result
is off by a few units in the last place of the largest term: of the weight itself, of a moment divided by its beta, and
of the second moment by as much as what it lost in the sum with the squared gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from penstock.errors import CapabilityError
from penstock.weights.optim.adapters import name_of


def check_undoable(optimizer: Optimizer) -> None:
    """Make sure that steps of an optimizer can be undone in place.

    Raises:
        CapabilityError: they cannot; the message says which can.
    """
    groups = optimizer.param_groups
    known = type(optimizer).__module__.startswith("torch.optim") and isinstance(optimizer, SGD | Adam)
    if not known or any(group.get("amsgrad") for group in groups):
        raise CapabilityError(
            f"steps of {name_of(optimizer)} cannot be undone in place: that is known of torch's SGD, Adam and "
            "AdamW (without amsgrad); keep copies instead"
        )


@torch.no_grad()
def undo_step(optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor], first: bool) -> None:
    """Take the last step back, in parameters and in what the optimizer remembers of them.

    Args:
        optimizer: which `check_undoable` accepts; its rates are still those of the step.
        gradients: those of the step, by parameter.
        first: it was the first step of all, so nothing was remembered before.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient, state = gradients[parameter], optimizer.state.get(parameter, {})
            if group["maximize"]:
                gradient = -gradient
            if isinstance(optimizer, SGD):
                _undo_sgd(parameter, gradient, group, state, first)
            else:
                _undo_adam(parameter, gradient, group, state)
            if first:
                optimizer.state.pop(parameter, None)


def _undo_sgd(weight: Tensor, gradient: Tensor, group: Mapping[str, Any], state: dict[str, Any], first: bool) -> None:
    rate, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    buffer: Tensor = state["momentum_buffer"] if momentum else gradient
    if momentum and not group["nesterov"]:
        weight.add_(buffer, alpha=rate)
    else:
        weight.add_(gradient, alpha=rate)
        if momentum:
            weight.add_(buffer, alpha=rate * momentum)
        weight.div_(1 - rate * decay)
    if momentum and not first:
        buffer.sub_(gradient + decay * weight, alpha=1 - group["dampening"]).div_(momentum)


def _undo_adam(weight: Tensor, gradient: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Adam, or AdamW where weight decay is decoupled."""
    (beta, gamma), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    steps, mean, square = state["step"].item(), state["exp_avg"], state["exp_avg_sq"]
    size = (square / (1 - gamma**steps)).sqrt_().add_(group["eps"])
    weight.addcdiv_(mean, size, value=rate / (1 - beta**steps))
    if group["decoupled_weight_decay"]:
        weight.div_(1 - rate * decay)
    elif decay:
        gradient = gradient + decay * weight
    _before(mean, gradient, beta)
    _before(square, gradient * gradient, gamma)
    square.clamp_(min=0)  # roundings must not make it negative
    state["step"].sub_(1)


def _before(average: Tensor, added: Tensor, beta: float) -> None:
    """What an exponential average was before something was added; nothing is left of it where beta is zero."""
    if beta:
        average.sub_(added, alpha=1 - beta).div_(beta)
    else:
        average.zero_()
