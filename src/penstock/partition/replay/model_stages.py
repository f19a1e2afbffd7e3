"""A whole model as the blocks of a pipeline, and the stages that they make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError
from penstock.partition.replay.comparison import check_stages
from penstock.partition.replay.placeholder import ResultSpec, TensorSpec, result_as_text, result_of_text
from penstock.partition.replay.stage_forward import Count, Cut, Seed, Specs, StageForward
from penstock.partition.replay.units import (
    PassClock,
    UnitGroup,
    check_unchanged,
    copies_of,
    has_hooks,
    name_in_model,
    no_seed,
    opened_for,
    record_forward,
)
from penstock.partition.replay.watch import state_of

_OF_A_STAGE = 1 / 3  # of the work of an even stage: units that take more are opened
_SPEC = "penstock.TensorSpec "


class UnitPart(nn.Module):
    """Units of a model, with what else is on their stage, under the names that the model has for them.

    Args:
        model: the model.
        group: of it.
    """

    def __init__(self, model: nn.Module, group: UnitGroup) -> None:
        super().__init__()
        self.group, self.cost, self.taken = group, group.work, group.taken
        for path in (*group.units, *group.unused):
            outer, _, key = path.rpartition(".")
            _shell(self, outer).add_module(key, model.get_submodule(path))
        for name in group.bare:
            outer, _, key = name.rpartition(".")
            owner, shell = model.get_submodule(name_in_model(name).rpartition(".")[0]), _shell(self, outer)
            if key in owner._parameters:
                shell.register_parameter(key, owner._parameters[key])
            else:
                shell.register_buffer(key, owner._buffers[key], persistent=key not in owner._non_persistent_buffers_set)

    def forward(self, x: Any) -> Any:
        """Refuse to be called: the model calls units."""
        raise AssertionError(f"{self.group.units} are called by the model around them, not with {x!r:.80}")

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all parameters and buffers."""
        parameters = self.named_parameters(remove_duplicate=False)
        return frozenset(name for name, _ in (*parameters, *self.named_buffers(remove_duplicate=False)))


def _shell(part: nn.Module, path: str) -> nn.Module:
    """Return the module within a part at a path, made where there is none."""
    for key in path.split(".") if path else ():
        if key not in part._modules:
            part.add_module(key, nn.Module())
        part = part.get_submodule(key)
    return part


class ModelStage(UnitPart):
    """The forward of a whole model as one stage runs it, which takes a value and returns another, as blocks do.

    The first stage takes what the model takes, the last one returns what it returns. In between travels a dict: the
    arguments, without the values of floating-point tensors, and what later stages need ("sent").

    Args:
        blocks: of the model.
        cut: where units run.
        index: the stage.

    Attributes:
        parts: the blocks of the stage.
        precision: that float32 weights are cast to; None for their own.
        count: returns how many targets a loss counts that is called between units (`StageForward`).
        counted: how many they were in the last forward, each with its node; None if nobody counts.
    """

    def __init__(self, blocks: UnitBlocks, cut: Cut, index: int) -> None:
        parts = {name: part for name, part in blocks.items() if cut.stages[name] == index}
        super().__init__(blocks.model, _joined(parts.values()))
        self.parts, self._blocks, self._cut, self._index = parts, blocks, cut, index
        self.precision: torch.dtype | None = None
        self.count: Count | None = None
        self.counted: list[Any] | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each unit."""
        for path in self.group.units:
            self.get_submodule(path).compile(*args, **kwargs)

    def forward(self, x: Any) -> Any:
        """Run the stage, with random numbers as they come."""
        return self.run(x, no_seed)

    def run(self, value: Any, seed: Seed) -> Any:
        """Run the stage.

        Args:
            value: what the model takes, or what the stage before returned.
            seed: for units and operations that may draw random numbers.
        """
        model, received = self._blocks.model, {}
        if self._index == 0:
            args, kwargs = arguments_of(value)
        else:
            args, kwargs, received = value["args"], value["kwargs"], value["sent"]
            device = next((p.device for p in self.parameters()), torch.device("cpu"))
            args, kwargs = pytree.tree_map(partial(_decoded, device=device), (args, kwargs))
        specs = self._blocks.specs(self.precision)
        forward = StageForward(model, specs, self._cut, self._index, received, seed, bound=True, count=self.count)
        self.counted = None if self.count is None else forward.counted
        with self._bare_in_place(), _mode_of(model, self.training):
            before = state_of(self._blocks.around.items())
            output = forward.run(args, kwargs)
            check_unchanged(model, before, self._blocks.around)
        if self._index == self._cut.last:
            return output
        args, kwargs = pytree.tree_map(_encoded, (args, kwargs))
        return {"args": args, "kwargs": kwargs, "sent": forward.sent}

    @contextmanager
    def _bare_in_place(self) -> Iterator[None]:
        """Let modules around units have the tensors that this stage has of them."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for name in self.group.bare:
            outer, _, key = name.rpartition(".")
            owner = self._blocks.model.get_submodule(name_in_model(name).rpartition(".")[0])
            own = self.get_submodule(outer)
            kind = "_parameters" if key in owner._parameters else "_buffers"
            places.append((getattr(owner, kind), key, getattr(own, kind)[key]))
        before = [held[key] for held, key, _ in places]
        for held, key, tensor in places:
            held[key] = tensor
        try:
            yield
        finally:
            for (held, key, _), tensor in zip(places, before, strict=True):
                held[key] = tensor


def _joined(parts: Iterable[UnitPart]) -> UnitGroup:
    units, unused, bare, work = zip(*(part.group[:4] for part in parts), strict=True)
    return UnitGroup(sum(units, ()), sum(unused, ()), sum(bare, ()), sum(work))


def blocks_in_stage(blocks: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return some blocks as a stage holds them, whose order decides which name of a shared parameter is the first."""
    own = {name: blocks[name] for name in names}
    return {names[0]: UnitPart(blocks.model, _joined(own.values()))} if isinstance(blocks, UnitBlocks) else own


def blocks_within(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Return blocks by name, in the place of a stage of a whole model its blocks."""
    found: dict[str, Any] = {}
    for name, block in blocks.items():
        found |= block.parts if isinstance(block, ModelStage) else {name: block}
    return found


class UnitBlocks(dict[str, UnitPart]):
    """The units of a whole model, in the order in which it calls them, as blocks.

    Args:
        model: the model.
        example: what it is called with.
        stages: into how many it is to be cut, at least.

    Attributes:
        model: the model.
        groups: the units of each block.
        around: the modules that are in no unit, whose code every stage runs, by path.

    Raises:
        CapabilityError: it cannot be divided; the message names what is in the way, and the line.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        stages: int,
        units: Sequence[str] = (),
        cut: Sequence[str] = (),
        *,
        timed: bool = False,
    ) -> None:
        self.model, self._example = model, arguments_of(example)
        opened = opened_for(model, units, cut)
        share = _OF_A_STAGE / 4 if timed else _OF_A_STAGE  # as work says less of it
        found = record_forward(model, *self._example, math.inf if opened else share / stages, opened)
        self.groups = {group.units[0]: group for group in found.groups}
        super().__init__({name: UnitPart(model, group) for name, group in self.groups.items()})
        self._recorded, self._specs = found, dict[torch.dtype | None, Specs]()
        held = [model.get_submodule(path) for group in found.groups for path in (*group.units, *group.unused)]
        inner = {id(module) for unit in held for module in unit.modules()}
        self.around = {path: module for path, module in model.named_modules() if id(module) not in inner}
        self._compared: Cut | None = None
        self._stages: list[ModelStage] = []

    @cached_property
    def seconds(self) -> list[float]:
        """Of a forward and a backward of each block, and of the code behind it, on the example."""
        args, kwargs = self._example
        with copies_of(self.model, args, kwargs) as (twin, given, named):
            clock = PassClock([group.units[0] for group in self.groups.values()])
            for path in clock.paths:
                twin.get_submodule(path).register_forward_pre_hook(partial(clock.hook, path), with_kwargs=True)
            return clock.seconds(lambda: twin(*given, **named))

    def place_of(self, path: str) -> int:
        """Return the number of the block that begins with a module of the model.

        Raises:
            ConfigError: none does, as the example does not call it, or calls it in turns with others.
        """
        for place, (first, group) in enumerate(self.groups.items()):
            if any(f"{unit}.".startswith(f"{path}.") for unit in group.units):
                if not f"{first}.".startswith(f"{path}."):
                    raise ConfigError(
                        f"cut: {path} is called in turns with {first}, so they are on one stage; cut elsewhere"
                    )
                return place
        raise ConfigError(f"cut: {path} has no weights, or the example does not call it; a stage begins with a layer")

    def specs(self, precision: torch.dtype | None) -> Specs:
        """Return the shapes of what units return in a precision, which all stages of this process share."""
        if precision not in self._specs:
            paths = [path for group in self.groups.values() for path in (*group.units, *group.unused)]
            units = {path: self.model.get_submodule(path) for path in paths}
            self._specs[precision] = Specs(units, precision, self._recorded.written, self._recorded.untold)
        return self._specs[precision]

    def check(self) -> None:
        """Make sure that the model has the units that it had.

        Raises:
            ConfigError: one was replaced.
        """
        hooked = next((path for path, module in self.around.items() if has_hooks(module)), None)
        if hooked is not None:
            raise ConfigError(f"{hooked or 'the model'} has got hooks, but runs on every stage; put them on layers")
        for name, group in self.groups.items():
            for path in (*group.units, *group.unused, *group.bare):
                now, own = _value_at(self.model, name_in_model(path)), _value_at(self[name], path)
                if now is not own and not (isinstance(now, nn.Parameter) and now.requires_grad):  # others look at these
                    raise ConfigError(
                        f"{path} is another object since the pipeline was made of the model, so the pipeline would "
                        "train without that change; make a new Pipeline of the changed model (a checkpoint of this one "
                        "can be loaded into it)"
                    )

    def stage(self, parts: Sequence[Sequence[str]], index: int) -> ModelStage:
        """Return a stage, given the names of the blocks of all.

        Raises:
            CapabilityError: the stages do not compute what the model does.
        """
        groups = [(stage, self.groups[name]) for stage, names in enumerate(parts) for name in names]
        stages = {path: stage for stage, group in groups for path in (*group.units, *group.unused)}
        cut = Cut(stages, len(parts) - 1)
        if cut != self._compared:
            check_stages(self.model, self.specs(None), cut, *self._example)
            self._compared = cut
        self._stages.append(ModelStage(self, cut, index))
        return self._stages[-1]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Give the model other values, and so all stages."""
        self.model.load_state_dict(state)
        for stage in self._stages:
            for name in stage.group.bare:
                held, now = _value_at(stage, name), _value_at(self.model, name_in_model(name))
                if held is not now:  # a buffer, on another device
                    held.copy_(now)


def _value_at(model: nn.Module, path: str) -> Any:
    """Return the module, parameter or buffer that a model has at a path; None if nothing."""
    owner, _, key = path.rpartition(".")
    try:
        return getattr(model.get_submodule(owner), key, None)
    except AttributeError:
        return None


def arguments_of(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments: a dict by name, a tuple or list by position, anything else alone."""
    if isinstance(value, Mapping):
        return [], dict(value)
    return (list(value), {}) if isinstance(value, tuple | list) else ([value], {})


def _encoded(leaf: Any) -> Any:
    """Return an argument as other stages get it: of a floating-point tensor, its shape."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        leaf = TensorSpec.of(leaf)
    return _SPEC + result_as_text(ResultSpec(*pytree.tree_flatten(leaf))) if isinstance(leaf, TensorSpec) else leaf


def _decoded(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, str) or not leaf.startswith(_SPEC):
        return leaf
    return result_of_text(leaf.removeprefix(_SPEC), device).leaves[0]


@contextmanager
def _mode_of(model: nn.Module, training: bool) -> Iterator[None]:
    """Put all of a model into evaluation mode while a stage of it is."""
    changed = [] if training else [module for module in model.modules() if module.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True
