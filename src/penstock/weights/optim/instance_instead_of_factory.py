"""Refuses optimizers and schedulers that exist already, with the lines that make one for each stage."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CyclicLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR

from penstock.errors import ConfigError

_LEFT_OUT = ("last_epoch", "verbose")  # of what schedulers take: where they begin
NEEDS_A_METRIC = "ReduceLROnPlateau needs a metric, which no update has by then: step it between two runs"


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
    by_hand = isinstance(scheduler, ReduceLROnPlateau)
    if scheduler is not None:
        name = type(scheduler).__name__
        alone = f"lr_scheduler is {name} of an optimizer that exists already"
        found.append(alone if optimizer is None else f"{name} was made of it")
    if scheduler is not None and not by_hand:
        lines.append(f"make_scheduler = lambda optimizer: {scheduler_line(scheduler)}")
        given.append("lr_scheduler=make_scheduler")
    if given:
        lines.append(f"pipeline = penstock.Pipeline(..., {', '.join(given)})")
    several, stepped = len(found) > 1, ""
    if by_hand:
        stepped = f". {NEEDS_A_METRIC}"
        lines += plateau_lines(scheduler_line(scheduler))
    elif scheduler is not None:
        stepped = ". Leave scheduler.step() out: every update takes its rate"
    functions = "" if not given else f"; pass {'functions' if len(given) > 1 else 'a function'} instead"
    code = "\n    ".join(lines)
    raise ConfigError(
        f"{', and '.join(found)}, but every stage needs {'both' if several else 'one'} of its own{functions}, with the "
        f"arguments that yours have{stepped}:\n    {code}"
    )


def plateau_lines(made: str) -> list[str]:
    """Return the lines that step a scheduler with a metric between two runs.

    Args:
        made: how it is made of `optimizer`.
    """
    return [
        f"plateaus = [{made} for optimizer in pipeline.optimizers().values()]",
        "for report in pipeline.run(loader): ...  # an epoch",
        "mean, _ = pipeline.evaluate(validation_loader)",
        "for plateau in plateaus: plateau.step(mean)",
    ]


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler | ReduceLROnPlateau)


def _made_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler of an optimizer, which does not know of it; None if it has none, or it is gone."""
    made = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and getattr(thing, "optimizer", None) is optimizer
    ]
    inner = {id(part) for scheduler in made for part in getattr(scheduler, "_schedulers", ())}
    return next((scheduler for scheduler in made if id(scheduler) not in inner), None)


def _optimizer_line(optimizer: torch.optim.Optimizer) -> str:
    known = list(inspect.signature(type(optimizer)).parameters.values())[1:]
    arguments = _changed(known, optimizer.defaults, {"lr"})
    groups = len(optimizer.param_groups)
    more = f"  # sort the pairs (name, parameter) into {groups} groups, as yours are" if groups > 1 else ""
    return f"{_place(optimizer, 'torch.optim')}({', '.join(['named', *arguments])}){more}"


def scheduler_line(scheduler: Any) -> str:
    """Write how a scheduler is made of `optimizer`, with the arguments that it has."""
    inner = getattr(scheduler, "_schedulers", None)
    if inner is not None:  # SequentialLR, ChainedScheduler
        parts = [f"[{', '.join(map(scheduler_line, inner))}]"]
        parts += [f"milestones={scheduler._milestones}"] if isinstance(scheduler, SequentialLR) else ["optimizer"]
        first = ["optimizer"] if isinstance(scheduler, SequentialLR) else []
        return f"{_place(scheduler, 'torch.optim.lr_scheduler')}({', '.join([*first, *parts])})"
    known = [p for p in list(inspect.signature(type(scheduler)).parameters.values())[1:] if p.name not in _LEFT_OUT]
    has = _arguments(scheduler)
    required = {p.name for p in known if p.default is inspect.Parameter.empty}
    if not type(scheduler).__module__.startswith("torch.optim"):
        required |= {p.name for p in known if p.name not in has}  # it may keep them under other names
        has = {p.name: ... for p in known} | has
    arguments = _changed(known, has, required)
    return f"{_place(scheduler, 'torch.optim.lr_scheduler')}({', '.join(['optimizer', *arguments])})"


def _changed(known: Sequence[inspect.Parameter], has: Mapping[str, Any], always: set[str]) -> list[str]:
    """Write the arguments that are not at their defaults, and some always; values that are not known as dots."""
    arguments = []
    for parameter in known:
        value = has.get(parameter.name, parameter.default)
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if parameter.name in always or value != parameter.default:
            arguments.append(f"{parameter.name}={_written(value)}")
    return arguments


def _written(value: Any) -> str:
    """Write a value as it stands in a script: a function by its name there; dots for what has none."""
    if isinstance(value, list | tuple) and value and all(map(callable, value)):
        names = [_written(one) for one in value]
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    if inspect.isfunction(value) and value.__name__.isidentifier():
        return value.__name__
    return repr(value) if _is_plain(value) else "..."


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, int | float | str)


def _place(thing: Any, module: str) -> str:
    kind = type(thing)
    where = kind.__module__
    known = where if where == "torch.optim.swa_utils" else module
    return f"{known}.{kind.__name__}" if where.startswith("torch.optim") else kind.__name__


def _arguments(scheduler: Any) -> dict[str, Any]:
    """Return what a scheduler was made with, by the names that its class gives that."""
    kept = vars(scheduler)
    has = {**_of_groups(scheduler), **kept}  # OneCycleLR keeps max_lr in the groups
    several = {"base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "lr_lambda"}  # torch adds an s
    has |= {name: _one(kept[f"{name}s"]) for name in several if f"{name}s" in kept and name not in kept}
    if isinstance(scheduler, OneCycleLR):
        phases, (group, *_) = scheduler._schedule_phases, scheduler.optimizer.param_groups
        has |= {
            "pct_start": round((phases[0]["end_step"] + 1) / scheduler.total_steps, 9),
            "anneal_strategy": scheduler._anneal_func_type,
            "div_factor": round(group["max_lr"] / group["initial_lr"], 9),
            "final_div_factor": round(group["initial_lr"] / group["min_lr"], 6),
            "three_phase": len(phases) == 3,
        }
    elif isinstance(scheduler, CyclicLR):
        up = round(scheduler.total_size * scheduler.step_ratio)
        down = round(scheduler.total_size) - up
        has |= {"step_size_up": up, "step_size_down": None if down == up else down}
        has["scale_fn"] = scheduler._scale_fn_custom
    elif isinstance(scheduler, MultiStepLR):
        has["milestones"] = sorted(scheduler.milestones.elements())
    elif isinstance(scheduler, SWALR):
        linear = scheduler.anneal_func is scheduler._linear_anneal
        has["anneal_strategy"] = "linear" if linear else "cos"
    return has


def _of_groups(scheduler: Any) -> dict[str, Any]:
    """Return the settings of the parameter groups: of several with different ones, a list."""
    groups = scheduler.optimizer.param_groups
    return {key: _one([group.get(key) for group in groups]) for key in groups[0] if key != "params"}


def _one(values: Sequence[Any]) -> Any:
    """Return the one value that all groups have, or a list of theirs."""
    alike = all(repr(value) == repr(values[0]) for value in values)
    return values[0] if alike else list(values)
