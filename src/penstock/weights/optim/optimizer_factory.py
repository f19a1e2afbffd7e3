"""Makes the optimizer of a stage with the user's function, and refuses one that cannot step a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.errors import CapabilityError, ConfigError

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Builds an optimizer from the named parameters of a stage, such as ``lambda named: torch.optim.AdamW(named,
lr=1e-3)``."""
NEEDS_A_METRIC = (
    "ReduceLROnPlateau needs a metric, which no update has by then: leave lr_scheduler out, make one of each optimizer "
    "in pipeline.optimizers().values(), and step it between two runs, with what pipeline.evaluate(loader) returns"
)


def refuse_instances(optimizer: Any, lr_scheduler: Any) -> None:
    """Refuse an optimizer or a scheduler in the place of a function that makes one; both at once.

    Raises:
        ConfigError: there is one; the message shows the function to write.
    """
    said = []
    if isinstance(optimizer, torch.optim.Optimizer):
        said.append(
            f"optimizer is an instance of {type(optimizer).__name__}, but every stage needs one of its own; pass a "
            f"function that makes it: optimizer=lambda named: {_line_of(optimizer)}"
        )
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        said.append(NEEDS_A_METRIC)
    elif isinstance(lr_scheduler, LRScheduler):
        name = type(lr_scheduler).__name__
        said.append(
            f"lr_scheduler is {name} of an optimizer that exists already, but every stage needs one of its own; pass a "
            f"function that makes it, as in lr_scheduler=lambda optimizer: {name}(optimizer, ...), and leave "
            "scheduler.step() out: every update takes its rate"
        )
    if said:
        raise ConfigError("\n".join(said))


def _line_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the call that makes such an optimizer of `named`, with the arguments that are not at their defaults."""
    kind, arguments = type(optimizer), ["named"]
    for name, parameter in inspect.signature(kind).parameters.items():
        value = optimizer.defaults.get(name, parameter.default)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if name == "lr" or (value != parameter.default and name in optimizer.defaults):
            arguments.append(f"{name}={value!r}")
    place = "torch.optim." if kind.__module__.startswith("torch.optim") else ""
    groups = len(optimizer.param_groups)
    more = f" (sort the pairs (name, parameter) into {groups} groups, as yours are)" if groups > 1 else ""
    return f"{place}{kind.__name__}({', '.join(arguments)}){more}"


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
