"""The units of a whole model: the layers that stages are made of, in the order of their calls, with their work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import CapabilityError, ConfigError
from penstock.partition.replay.stage_forward import Cut, Specs, StageForward

_DIVIDED_OF_TORCH = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip


class UnitGroup(NamedTuple):
    """Units that have to be on one stage, with what else of the model is with them.

    Attributes:
        units: their paths, in the order of their first calls: one, or several that are called in turns.
        unused: paths of units that the example does not call.
        bare: names of parameters and buffers of modules around units, which code behind these units uses.
        work: of the units.
    """

    units: tuple[str, ...]
    unused: tuple[str, ...]
    bare: tuple[str, ...]
    work: float


class RecordedForward(NamedTuple):
    """What a forward of a model has shown.

    Attributes:
        groups: its units, in the order of the first calls.
        written: keys of values that operations between units write into.
    """

    groups: list[UnitGroup]
    written: set[str]


def record_forward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], largest: float) -> RecordedForward:
    """Find the units of a model by a forward.

    Args:
        model: which.
        args, kwargs: what it is called with.
        largest: the share of the work of the model that a unit may take, if it can be divided: larger ones are opened,
            so that their code runs between units. Where such code cannot be divided, larger ones are left.

    Raises:
        CapabilityError: the code between the largest layers cannot be divided.
        ConfigError: the model calls no layers.
    """
    work, first = work_of_modules(model, args, kwargs), None
    while largest < 2:
        try:
            return _grouped(model, units_of(model, work, largest), work, args, kwargs)
        except CapabilityError as error:
            first = first or error
        largest *= 2
    assert first is not None
    raise first


def units_of(model: nn.Module, work: Mapping[str, float], largest: float) -> dict[str, nn.Module]:
    """Return the units of a model by path, in the order of the model."""
    units: dict[str, nn.Module] = {}
    total = work.get("", 0.0) or 1.0

    def walk(path: str, module: nn.Module) -> None:
        if not any(True for _ in module.parameters()):
            return
        small = path in work and work[path] <= largest * total  # what is not called itself, its children may be
        if path and (small or not _can_be_opened(module)):
            units[path] = module
            return
        for name, child in module.named_children():
            walk(f"{path}.{name}".removeprefix("."), child)

    walk("", model)
    return units


def _can_be_opened(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.") and not isinstance(module, _DIVIDED_OF_TORCH):
        return False
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "parametrizations"):
        return False
    return any(any(True for _ in child.parameters()) for child in module.children())


def work_of_modules(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Return the work of each module that a forward calls, by path: its floating-point operations and parameters."""
    counter, work, begun = FlopCounterMode(display=False), dict[str, float](), list[float]()
    handles = []

    def begin(*_: Any) -> None:
        begun.append(float(counter.get_total_flops()))

    def end(path: str, module: nn.Module, *_: Any) -> None:
        before = work.get(path, float(sum(p.numel() for p in module.parameters())))
        work[path] = before + counter.get_total_flops() - begun.pop()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(partial(end, path)))
    try:
        with kept_as_it_is(model), counter:
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return work


@contextmanager
def kept_as_it_is(model: nn.Module) -> Iterator[None]:
    """Run a model so that its buffers and torch's random numbers are as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for buffer, content in buffers:
            buffer.data.copy_(content)


def _grouped(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    work: Mapping[str, float],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> RecordedForward:
    specs = Specs(units)
    frame = _watched(model, specs, args, kwargs)
    groups = _in_turns(frame.calls)
    if not groups:
        raise ConfigError(f"{type(model).__name__} calls no layers with weights, so it cannot be divided")
    home = {path: number for number, group in enumerate(groups) for path in group}
    taken = {id(t) for unit in units.values() for t in (*unit.parameters(), *unit.buffers())}
    unused: list[list[str]] = [[] for _ in groups]
    bare: list[list[str]] = [[] for _ in groups]
    before = 0
    for path in units:
        before = home.get(path, before)
        if path not in home:
            unused[before].append(path)
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        unit, by = frame.used.get(id(tensor), (None, ""))
        if id(tensor) not in taken:
            bare[0 if unit is None else home[unit]].append(name)
        elif by:
            raise CapabilityError(f"{name} is used outside of the layer that it belongs to, by {by}")
    made = [
        UnitGroup(tuple(group), tuple(idle), tuple(names), sum(work.get(path, 0.0) for path in group))
        for group, idle, names in zip(groups, unused, bare, strict=True)
    ]
    return RecordedForward(made, specs.written)


def _in_turns(calls: Sequence[str]) -> list[list[str]]:
    """Return units in the order of their first calls; those whose calls lie between two of another unit are with it."""
    last = {path: place for place, path in enumerate(calls)}
    groups: list[list[str]] = []
    end = -1
    for path in dict.fromkeys(calls):
        if calls.index(path) > end:
            groups.append([])
        groups[-1].append(path)
        end = max(end, last[path])
    return groups


def _watched(model: nn.Module, specs: Specs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StageForward:
    """Run a forward and watch it.

    Raises:
        CapabilityError: it does something that stages which compute a part of it could not do alike.
    """
    before, drawn = _attributes(model, specs.units), _drawn()
    with kept_as_it_is(model):
        frame = StageForward(model, specs, Cut(dict.fromkeys(specs.units, 0), 0), None, {}, no_seed)
        frame.run(args, kwargs)
    now = _attributes(model, specs.units)
    changed = next((name for name in (*before, *now) if before.get(name) != now.get(name)), None)
    kind = type(model).__name__
    if changed is not None:
        raise CapabilityError(
            f"the forward of {kind} changes {changed}, and each stage would do that with what it has; let it return "
            "that, or keep it in a layer that alone uses it"
        )
    if drawn != _drawn():
        raise CapabilityError(
            f"the forward of {kind} draws from Python's or NumPy's random numbers, which differ on each stage; draw "
            "from torch's"
        )
    return frame


def no_seed(name: str) -> None:
    """Let random numbers come as they do."""


def _drawn() -> Any:
    return random.getstate(), repr(np.random.get_state(legacy=False)["state"])


def _attributes(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what a forward might change on the modules of a model, by name: attributes, and what containers hold.

    Units may write into their own buffers, as layers with running statistics do.
    """
    inner = {id(module) for unit in units.values() for module in unit.modules()}
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            name = f"{path}.{key}".removeprefix(".")
            if key == "_buffers":
                for buffer_name, buffer in value.items():
                    version = None if buffer is None or id(module) in inner else buffer._version
                    found[f"{path}.{buffer_name}".removeprefix(".")] = id(buffer), version
            elif isinstance(value, list | dict | set):
                found[name] = [id(part) for part in (value.values() if isinstance(value, dict) else value)]
            elif key not in ("training", "_compiled_call_impl"):
                found[name] = value if isinstance(value, int | float | str) else id(value)
    return found
