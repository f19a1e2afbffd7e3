"""Makes the optimizer of a stage with the user's function, and refuses one that cannot step a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.errors import CapabilityError, ConfigError
from penstock.weights.optim.instance_instead_of_factory import refuse_instances

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Builds an optimizer from the named parameters of a stage, such as ``lambda named: torch.optim.AdamW(named,
lr=1e-3)``."""


def make_optimizer(factory: Any, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of a stage.

    Raises:
        ConfigError: the factory is an optimizer itself, or no function.
        CapabilityError: what it makes cannot step a stage.
    """
    refuse_instances(factory, None)
    if not callable(factory):
        raise ConfigError(
            f"optimizer must be a function, named parameters -> optimizer, such as lambda named: "
            f"torch.optim.AdamW(named, lr=1e-3); got {factory!r:.80}"
        )
    try:
        optimizer: torch.optim.Optimizer = factory(list(parameters.items()))
    except Exception as error:
        error.add_note(
            "raised by optimizer, which is called with the pairs (name, parameter) of a stage, as named_parameters() "
            "yields them: optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), or [p for _, p in named] in place "
            "of named"
        )
        raise
    _check_capability(optimizer, parameters)
    return optimizer


def _check_capability(optimizer: Any, parameters: dict[str, nn.Parameter]) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CapabilityError(f"the optimizer factory returned {name}, not a torch optimizer; did it forget return?")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CapabilityError(
            "SparseAdam takes sparse gradients only, but those of a stage accumulate in a dense buffer; use Adam or "
            "AdamW (embeddings with sparse=True go with them, too)"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CapabilityError(
            f"{name} is made with differentiable=True, but updates are made in memory that is used again, so no "
            "gradient can lead through them; leave differentiable out"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CapabilityError(
            f"{name} needs a closure that evaluates the model again, which a pipeline stage cannot do; "
            "use an optimizer whose step() takes no closure, such as AdamW"
        )
    rateless = next((group for group in optimizer.param_groups if "lr" not in group), None)
    if rateless is not None:
        known = ", ".join(key for key in rateless if key not in ("params", "param_names")) or "no settings"
        raise CapabilityError(
            f"{name} has a parameter group without lr (it has {known}), which schedules and corrections set, and "
            "reports show; give it one in the factory: for group in optimizer.param_groups: group.setdefault('lr', 1.0)"
        )
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [key for key, p in parameters.items() if id(p) not in covered]
    if missing:
        raise CapabilityError(
            f"the optimizer factory left out {len(missing)} trained parameters, the first of them {missing[0]}; "
            "pass them all to the optimizer, or freeze some with requires_grad=False"
        )
