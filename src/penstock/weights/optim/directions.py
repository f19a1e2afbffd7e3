"""The expected direction of an optimizer's next steps, computed from its state.

A prediction n updates ahead is W - n lr direction. The direction is that of the step the optimizer would make if the
next gradient were as expected (SpecTrain, arXiv 1809.02839; XPipe, arXiv 1911.04610; PipeOptim, arXiv 2312.00839): the
momentum of SGD, the quotient of Adam's bias-corrected moments, and Muon's momentum orthogonalized by its Newton-Schulz
iteration, times its factor for the shape. That momentum is a mean of gradients, so with a next gradient equal to it
Nesterov's look-ahead gives the same direction. Weight decay is not included.

Adan, SOAP and NAdam are rejected: their next step depends on the next difference of gradients, on a rotation of the
next gradient, or on its weight in a schedule of momenta, and no source defines an expectation for these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.errors import CapabilityError
from penstock.weights.optim.muon import Muon, orthogonalized, rate_factor
from penstock.weights.optim.optimizer_adapters import Joined, name_of, optimizer_of

PREDICTABLE = (SGD, Adam, AdamW, optim.Muon, Muon)


def check_predictable(optimizer: Optimizer) -> None:
    """Raise an error if the steps of an optimizer cannot be predicted.

    Raises:
        CapabilityError: they cannot.
    """
    if isinstance(optimizer, Joined):
        for part in optimizer.parts:
            check_predictable(part)
        return
    names = ", ".join(dict.fromkeys(kind.__name__ for kind in PREDICTABLE))
    if type(optimizer) not in PREDICTABLE:
        raise CapabilityError(
            f"weights can be predicted from the state of {names}, not of {name_of(optimizer)}; use one of these, or a "
            "method without prediction"
        )
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD) and not group["momentum"]:
            raise CapabilityError(
                "SGD without momentum has no state to predict from; set momentum, or use a method without prediction"
            )
        if group.get("maximize") or group.get("amsgrad"):
            raise CapabilityError("weights cannot be predicted for optimizers with maximize or amsgrad; turn them off")


@torch.no_grad()
def direction(
    optimizer: Optimizer, parameter: nn.Parameter, group: Mapping[str, Any], uncorrected: bool = False
) -> Tensor | None:
    """Return the direction of an optimizer's steps for one parameter, in units of the learning rate.

    Args:
        optimizer: an optimizer that `check_predictable` accepts.
        parameter, group: the parameter and its parameter group.
        uncorrected: use XPipe's form of Adam's direction, with 1 - beta in place of 1 - beta^t.

    Returns:
        None before the first update.
    """
    state, kind = optimizer.state.get(parameter, {}), optimizer_of(optimizer, parameter)
    if isinstance(kind, SGD | optim.Muon):
        found: Tensor | None = state.get("momentum_buffer")
        if isinstance(kind, SGD) or found is None:
            return found
        return orthogonalized(found, group) * rate_factor(found, group)
    if "exp_avg" not in state:
        return None
    steps = 1 if uncorrected else int(state["step"])
    beta1, beta2 = group["betas"]
    deviation = (state["exp_avg_sq"] / (1.0 - beta2**steps)).sqrt_().add_(group["eps"])
    result: Tensor = (state["exp_avg"] / (1.0 - beta1**steps)).div_(deviation)
    return result
