"""Refuses optimizers and schedulers that exist already, with the lines that make one for each stage."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.errors import ConfigError

_LEFT_OUT = ("last_epoch", "verbose")  # of what schedulers take: where they begin


def refuse_instances(optimizer: Any, lr_scheduler: Any) -> None:
    """Refuse an optimizer or a scheduler in the place of a function that makes one; both at once.

    A scheduler that was made of the optimizer counts, too: its steps would not reach the stages.

    Raises:
        ConfigError: there is one; the message shows the lines to write.
    """
    made = isinstance(optimizer, torch.optim.Optimizer)
    scheduler = lr_scheduler if _is_scheduler(lr_scheduler) else None
    if made and scheduler is None and lr_scheduler is None:
        scheduler = _made_of(optimizer)
    if made:
        _refuse(optimizer, scheduler)
    elif scheduler is not None:
        _refuse(None, scheduler)


def _refuse(optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    found, lines, given = [], [], []
    if optimizer is not None:
        found.append(f"optimizer is an instance of {type(optimizer).__name__}")
        lines.append(f"make_optimizer = lambda named: {_optimizer_line(optimizer)}")
        given.append("optimizer=make_optimizer")
    if scheduler is not None:
        name = type(scheduler).__name__
        alone = f"lr_scheduler is {name} of an optimizer that exists already"
        found.append(alone if optimizer is None else f"{name} was made of it")
        lines.append(f"make_scheduler = lambda optimizer: {_scheduler_line(scheduler)}")
        given.append("lr_scheduler=make_scheduler")
    several = len(found) > 1
    stepped = ". Leave scheduler.step() out: every update takes its rate" if scheduler is not None else ""
    code = "\n    ".join([*lines, f"pipeline = penstock.Pipeline(..., {', '.join(given)})"])
    raise ConfigError(
        f"{', and '.join(found)}, but every stage needs {'both' if several else 'one'} of its own; pass "
        f"{'functions' if several else 'a function'} instead, with the arguments that yours have{stepped}:\n    {code}"
    )


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler | ReduceLROnPlateau)


def _made_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler of an optimizer, which knows only that it has one; None if it has none, or it is gone."""
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return None
    for thing in gc.get_objects():
        if issubclass(type(thing), LRScheduler) and getattr(thing, "optimizer", None) is optimizer:
            return thing
    return None


def _optimizer_line(optimizer: torch.optim.Optimizer) -> str:
    known = list(inspect.signature(type(optimizer)).parameters.values())[1:]
    arguments = _changed(known, optimizer.defaults, {"lr"})
    groups = len(optimizer.param_groups)
    more = f"  # sort the pairs (name, parameter) into {groups} groups, as yours are" if groups > 1 else ""
    return f"{_place(optimizer, 'torch.optim')}({', '.join(['named', *arguments])}){more}"


def _scheduler_line(scheduler: Any) -> str:
    known = [p for p in list(inspect.signature(type(scheduler)).parameters.values())[1:] if p.name not in _LEFT_OUT]
    has = {**scheduler.optimizer.param_groups[0], **vars(scheduler)}  # OneCycleLR keeps max_lr in the groups
    required = {p.name for p in known if p.default is inspect.Parameter.empty}
    arguments = _changed(known, has, required)
    return f"{_place(scheduler, 'torch.optim.lr_scheduler')}({', '.join(['optimizer', *arguments])})"


def _changed(known: Sequence[inspect.Parameter], has: Mapping[str, Any], always: set[str]) -> list[str]:
    """Write the arguments that are not at their defaults, and some always; values that are not known as dots."""
    arguments = []
    for parameter in known:
        value = has.get(parameter.name, parameter.default)
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if parameter.name in always or value != parameter.default:
            arguments.append(f"{parameter.name}={repr(value) if _is_plain(value) else '...'}")
    return arguments


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, int | float | str)


def _place(thing: Any, module: str) -> str:
    kind = type(thing)
    return f"{module}.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
