"""A whole model as the blocks of a pipeline, and the stages that they make."""

from __future__ import annotations

import copy
import inspect
import math
import numbers
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import CapabilityError, ConfigError
from penstock.partition.replay.comparison import check_stages
from penstock.partition.replay.placeholder import ResultSpec, TensorSpec, result_as_text, result_of_text
from penstock.partition.replay.specs import Specs, without_graphs
from penstock.partition.replay.stage_forward import Cut, Note, Seed, StageForward
from penstock.partition.replay.state import FrameState, Node
from penstock.partition.replay.units import (
    PassClock,
    UnitGroup,
    copies_of,
    hooked_backwards,
    modules_around,
    name_in_model,
    named_tensors,
    no_seed,
    opened_for,
    others_of,
    record_forward,
)

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
        note: is told of operations between units (`StageForward`).
        found: what the next forward is to find on modules around units, if it runs one again (`state`).
    """

    def __init__(self, blocks: UnitBlocks, cut: Cut, index: int) -> None:
        parts = {name: part for name, part in blocks.items() if cut.stages[name] == index}
        super().__init__(blocks.model, _joined(parts.values()))
        self.parts, self._blocks, self._cut, self._index = parts, blocks, cut, index
        self.precision: torch.dtype | None = None
        self.note: Note | None = None
        self.found: dict[int, Node] | None = None
        self._buffer_names = {name for name, _ in self.named_buffers()} & {*self.group.bare}

    def state(self) -> dict[int, Node]:
        """Return what a forward would find now on modules around units."""
        return self._blocks.state.saved(self._index)

    def restore(self, found: Mapping[int, Node]) -> None:
        """Let the next forward find that (`state`)."""
        self._blocks.state.restore(self._index, found)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each unit."""
        for path in self.group.units:
            self.get_submodule(path).compile(*args, **kwargs)

    def give_values(self, seed: int) -> None:
        """Initialise what of the stage is on meta, and the buffers of modules around units (`initialise`)."""
        around = [buffer for module in self._blocks.around.values() for buffer in module.buffers(recurse=False)]
        held = [*self.parameters(), *self.buffers(), *around]
        initialise(self._blocks.model, {id(tensor) for tensor in held if tensor.is_meta}, seed)

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
        forward = StageForward(model, specs, self._cut, self._index, received, seed, bound=True, note=self.note)
        bare = {name: _value_at(self, name) for name in self.group.bare}
        buffers = {name: tensor for name, tensor in bare.items() if name in self._buffer_names}
        state = self._blocks.state.of(self._index, forward, self.found, buffers)
        with self._parameters_in_place(bare.keys() - buffers.keys()), _mode_of(model, self.training), state as left:
            output = forward.run(args, kwargs)
        for name in left.keys() & buffers.keys():
            outer, _, key = name.rpartition(".")
            self.get_submodule(outer)._buffers[key] = left[name]
        if self._index == self._cut.last:
            return output
        args, kwargs = pytree.tree_map(_encoded, (args, kwargs))
        return {"args": args, "kwargs": kwargs, "sent": forward.sent}

    @contextmanager
    def _parameters_in_place(self, names: Iterable[str]) -> Iterator[None]:
        """Let modules have the parameters that this stage has of them."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for name in names:
            outer, _, key = name.rpartition(".")
            owner = self._blocks.model.get_submodule(name_in_model(name).rpartition(".")[0])
            places.append((owner._parameters, key, self.get_submodule(outer)._parameters[key]))
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
        state: what their code keeps.

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
        initialise(model, {id(buffer) for buffer in model.buffers() if buffer.is_meta}, 0, all_of_them=False)
        opened = opened_for(model, units, cut)
        share = _OF_A_STAGE / 4 if timed else _OF_A_STAGE  # as work says less of it
        found = record_forward(model, *self._example, math.inf if opened else share / stages, opened)
        self.groups = {group.units[0]: group for group in found.groups}
        super().__init__({name: UnitPart(model, group) for name, group in self.groups.items()})
        self._recorded, self._specs = found, dict[torch.dtype | None, Specs]()
        self.around = modules_around(model, self.specs(None).units.values())
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
            self._specs[precision] = self._recorded.specs.on(self.model, precision)
        return self._specs[precision]

    def check(self) -> None:
        """Make sure that the model has the units that it had.

        Raises:
            ConfigError: one was replaced.
        """
        hooked = hooked_backwards(self.around)
        if hooked is not None:
            raise ConfigError(f"{hooked or 'the model'} has got hooks on backwards, but runs on every stage")
        for name, group in self.groups.items():
            for path in (*group.units, *group.unused, *group.bare):
                now, own = _value_at(self.model, name_in_model(path)), _value_at(self[name], path)
                known = path in self.specs(None).state or (isinstance(now, nn.Parameter) and now.requires_grad)
                if now is not own and not known:  # others look at these
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
            check_stages(self.model, self.specs(None), cut, self._recorded.changed, *self._example)
            self._compared = cut
        self.state.add_stage(index)
        self._stages.append(ModelStage(self, cut, index))
        return self._stages[-1]

    @cached_property
    def state(self) -> FrameState:
        """What code around units keeps, of what the example shows to change."""
        changed = self._recorded.changed
        others = others_of(self.model)
        others = [(name, held) for name, held in others if any(f"{n}.".startswith(f"{name}.") for n in changed)]
        return FrameState(self.around, others, changed)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Give the model other values, and so all stages."""
        elsewhere = {name for name, tensor in named_tensors(self.model) if tensor.is_meta}
        own = {name: value for name, value in state.items() if name not in elsewhere}
        self.model.load_state_dict(own, strict=len(own) == len(state))
        for stage in self._stages:
            for name in stage.group.bare:
                held, now = _value_at(stage, name), _value_at(self.model, name_in_model(name))
                if held is not now:  # a buffer, on another device
                    held.copy_(now)


class _NumberedDraws(TorchDispatchMode):
    """Seeds each operation that draws random numbers, by its number, as on meta none advances a generator."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._count += 1
            generator = kwargs.get("generator") or torch.default_generator
            generator.manual_seed(zlib.crc32(f"{self._name} {self._count}".encode()))
        return func(*args, **kwargs)


def initialise(model: nn.Module, wanted: Collection[int], seed: int, *, all_of_them: bool = True) -> None:
    """Give memory and values to some tensors of a model on meta, which are the same whichever these are.

    `reset_parameters` of each module that has some comes first, then `_init_weights` of the nearest module around it,
    as libraries do; modules within others are first, and of two with one parameter the later one. They run in a copy of
    the model without any other values.

    Args:
        model: whose tensors keep their identities.
        wanted: identities of the tensors.
        seed: of the random numbers.
        all_of_them: refuse tensors that no initialiser fills, rather than leave them on meta.

    Raises:
        ConfigError: no initialiser fills one of them, or one fails; the message names it.
    """
    if not wanted:
        return
    memo, held = without_graphs(model), dict(named_tensors(model))
    for tensor in held.values():
        if id(tensor) not in memo:
            made = torch.empty_like(tensor, device="cpu" if id(tensor) in wanted else "meta", requires_grad=False)
            made = made.fill_(torch.nan) if made.is_floating_point() else made
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            vars(memo[id(tensor)]).update(vars(tensor))
    twin = copy.deepcopy(model, memo)
    own, modules = {id(memo[key]) for key in wanted}, dict(twin.named_modules())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for step, find in enumerate((_resets, _init_weights_around)):
            for path, module in reversed(modules.items()):
                has_some = any(id(tensor) in own for _, tensor in named_tensors(module))
                initialiser = find(modules, path) if has_some else None
                if initialiser is not None:
                    with _NumberedDraws(f"{seed} {step} {path}"):
                        _run_initialiser(initialiser, path)
    filled, swapped = dict(named_tensors(twin)), set[int]()
    for name, tensor in held.items():
        if id(tensor) in wanted and id(tensor) not in swapped:
            value = filled[name]
            if value.isnan().any() if value.is_floating_point() else not value._version and value.numel():
                if not all_of_them:
                    continue
                owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
                raise ConfigError(
                    f"{name} is on the device 'meta', and neither reset_parameters of its {owner} nor _init_weights of "
                    "a module around it gives it values; let one do so, make it with device='cpu', or give the model "
                    "memory and values first: model.to_empty(device='cpu'), then its initialization or load_state_dict"
                )
            swapped.add(id(tensor))
            torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]


def _resets(modules: Mapping[str, nn.Module], path: str) -> Any:
    module = modules[path]
    return _taking(getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))


def _init_weights_around(modules: Mapping[str, nn.Module], path: str) -> Any:
    keys = path.split(".") if path else []
    around = (modules.get(".".join(keys[:depth])) for depth in range(len(keys), -1, -1))
    return _taking((getattr(module, "_init_weights", None) for module in around), modules[path])


def _taking(functions: Iterable[Any], *args: Any) -> Any:
    """Return the first of some functions that takes arguments, with these; None if there is none."""
    for function in filter(callable, functions):
        try:
            inspect.signature(function).bind(*args)
        except TypeError:
            continue
        return partial(function, *args)
    return None


def _run_initialiser(initialiser: Any, path: str) -> None:
    try:
        initialiser()
    except Exception as error:  # whatever code says that asks for values of other stages
        raise ConfigError(
            f"{path or 'the model'}: {initialiser.func.__name__} fails where parameters of other stages have no values "
            f"({type(error).__name__}: {error}); give the model memory and values first"
        ) from error


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
    """Return an argument as other stages get it: of a floating-point tensor, its shape.

    Raises:
        CapabilityError: it is an array.
    """
    if hasattr(leaf, "__array__") and not isinstance(leaf, Tensor | numbers.Number):
        raise CapabilityError(
            f"an argument of the model is a {type(leaf).__name__}, which is not sent to other stages; pass a tensor"
        )
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
