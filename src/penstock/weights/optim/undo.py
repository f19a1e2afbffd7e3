"""Undo an optimizer step by arithmetic, without copies but with rounding errors.

The equations of a step are solved for the previous weight and moments. Every operation rounds, so the result is off by
a few units in the last place of the largest term: of the weight itself, of a moment divided by its beta, and of the
second moment by as much as it lost in the sum with the squared gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from penstock.errors import CapabilityError
from penstock.weights.optim.optimizer_adapters import name_of


def check_undoable(optimizer: Optimizer) -> None:
    """Raise an error if steps of an optimizer cannot be undone in place.

    Raises:
        CapabilityError: they cannot; the message names the optimizers whose steps can.
    """
    groups = optimizer.param_groups
    known = type(optimizer).__module__.startswith("torch.optim") and isinstance(optimizer, SGD | Adam)
    if not known or any(group.get("amsgrad") for group in groups):
        raise CapabilityError(
            f"steps of {name_of(optimizer)} cannot be undone in place, only those of torch's SGD, Adam and AdamW "
            "(without amsgrad); keep copies instead"
        )


@torch.no_grad()
def undo_step(optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor], first: bool) -> None:
    """Undo the last step, in the parameters and in the optimizer state.

    Args:
        optimizer: an optimizer that `check_undoable` accepts; its rates must still be those of the step.
        gradients: the gradients of the step, by parameter.
        first: True if it was the first step, before which there was no state.
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
    """Undo a step of Adam, or of AdamW where weight decay is decoupled."""
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
    square.clamp_(min=0)  # rounding must not make it negative
    state["step"].sub_(1)


def _before(average: Tensor, added: Tensor, beta: float) -> None:
    """Restore an exponential average to its value before `added`; zero if beta is zero."""
    if beta:
        average.sub_(added, alpha=1 - beta).div_(beta)
    else:
        average.zero_()
