"""The units of a whole model: the layers that stages are made of, in the order of their calls, with their work."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import CapabilityError, ConfigError
from penstock.partition.replay.stage_forward import Cut, Specs, StageForward, without_graphs
from penstock.partition.replay.watch import UnitBorders, changed, state_of

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
        untold: units and operations whose results have shapes or numbers that depend on values.
    """

    groups: list[UnitGroup]
    written: set[str]
    untold: set[Any]


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
    first = None
    with copies_of(model, args, kwargs) as (twin, given, named):
        work = work_of_modules(twin, given, named)
    while largest < 2:
        try:
            with copies_of(model, args, kwargs) as (twin, given, named):
                return _grouped(twin, units_of(twin, work, largest), work, given, named)
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
        if isinstance(module, torch.jit.ScriptModule):
            raise CapabilityError(
                f"{path} is scripted (torch.jit), and cannot be watched; use the module that it was made of"
            )
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(partial(end, path)))
    try:
        with counter:
            model(*args, **kwargs)
    except Exception as error:
        raise CapabilityError(
            f"the forward of a copy of {type(model).__name__} fails on the example: {type(error).__name__}: {error}"
        ) from error
    for handle in handles:
        handle.remove()
    return work


@contextmanager
def copies_of(model: nn.Module, *given: Any) -> Iterator[Any]:
    """Yield copies of a model and of what it is called with, so that running them changes nothing of the originals.

    Raises:
        CapabilityError: the model cannot be copied.
    """
    try:
        made = copy.deepcopy((model, *given), without_graphs(model))
    except Exception as error:  # whatever an attribute of a model says
        raise CapabilityError(
            f"{type(model).__name__} cannot be copied, to be run on the example without being changed: {error}"
        ) from error
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield made


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
    return RecordedForward(made, specs.written, specs.untold)


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
    units = specs.units
    inner = {id(module) for unit in units.values() for module in unit.modules()}
    around = {path: module for path, module in model.named_modules() if id(module) not in inner}
    hooked = next((path for path, module in around.items() if has_hooks(module)), None)
    if hooked is not None:
        raise CapabilityError(
            f"{hooked or 'the model'} has hooks, but its code runs on every stage; put them on its layers"
        )
    before = state_of(around.items())
    buffers = {
        f"{path}.{name}": (b, b.clone()) for path, m in around.items() for name, b in m.named_buffers(recurse=False)
    }
    forward = StageForward(model, specs, Cut(dict.fromkeys(units, 0), 0), None, {}, no_seed)
    with UnitBorders(units, forward.depends) as borders:
        forward.borders = borders
        forward.run(args, kwargs)
    check_unchanged(model, before, around)
    for name, (buffer, copied) in buffers.items():
        if not buffer.is_meta and not torch.equal(buffer, copied) and not copied.isnan().any():
            raise CapabilityError(
                f"an operation between layers writes into the buffer {name.lstrip('.')}; put it into one"
            )
    return forward


def has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)


def check_unchanged(model: nn.Module, before: Mapping[str, Any], around: Mapping[str, nn.Module]) -> None:
    """Refuse a forward that has changed something on the modules around its units, which every stage runs.

    Args:
        model: whose forward.
        before: `state_of` those modules.
        around: these, by path.

    Raises:
        CapabilityError: it has.
    """
    name = changed(before, state_of(around.items()))
    if name is not None:
        raise CapabilityError(
            f"the forward of {type(model).__name__} changes {name}, and each stage would do that with what it has; let "
            "it return what it keeps, or draw from torch's random numbers"
        )


def no_seed(name: str) -> None:
    """Let random numbers come as they do."""
