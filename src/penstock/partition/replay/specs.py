"""Shapes of results that other stages compute, found by running layers and operations without values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError
from penstock.partition.replay.placeholder import (
    ResultSpec,
    SameTensor,
    TensorSpec,
)
from penstock.partition.replay.state import nothing_outside


class Specs:
    """Shapes of what units and operations of other stages return, by the shapes of their arguments.

    Args:
        units: of a model, by path.
        precision: that float32 weights are cast to; None for their own.
        written: keys of values that operations write into, as far as they are known.
        untold: units and operations whose results have shapes or numbers that depend on values, likewise.
        hooked: paths of units whose hooks behind the forward run on every stage.
        state: names of buffers that code around units changes, each with a unit on the stage that has it.

    Attributes:
        units, written, untold, hooked, state: the same.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        precision: torch.dtype | None = None,
        written: Iterable[str] = (),
        untold: Iterable[Any] = (),
        hooked: Collection[str] = (),
        state: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.units, self.written, self.untold, self._precision = units, set(written), set(untold), precision
        self.hooked, self.state = hooked, state
        self._found: dict[Any, ResultSpec] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Specs:
        made = copy.copy(self)
        made.units, made._found = copy.deepcopy(self.units, memo), {}
        return made

    def on(self, model: nn.Module, precision: torch.dtype | None = None) -> Specs:
        """Return the same of the units of a copy of the model, or in another precision."""
        made = copy.copy(self)
        made.units = {path: model.get_submodule(path) for path in self.units}
        if precision is not None:
            made._precision, made._found = precision, {}
        return made

    def of_unit(self, path: str, args: Any, kwargs: Any, leaves: Sequence[Tensor]) -> ResultSpec:
        """Return what a unit of another stage returns."""
        key = path, self.units[path].training, torch.is_grad_enabled(), _autocast(), shapes_in((args, kwargs))
        return self._remembered(key, partial(self._try, path, args, kwargs, leaves))

    def _remembered(self, key: Any, find: Callable[[], ResultSpec]) -> ResultSpec:
        try:
            found = self._found.get(key)
        except TypeError:  # an argument does not say what equals it
            return find()
        return found or self._found.setdefault(key, find())

    def _try(self, path: str, args: Any, kwargs: Any, leaves: Sequence[Tensor]) -> ResultSpec:
        """Call a copy of a unit without values, or with zeros if it asks for values."""
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
        for where in (device,) if _autocast() else (torch.device("meta"), device):  # which is none on meta
            with torch._C.DisableTorchFunction():  # modes that would give values to what is made on meta
                made = {id(leaf): TensorSpec.of(leaf).zeros(where) for leaf in leaves}
                twin = _twin(self.units[path], where, self._precision)
            try:
                a, k = _map_tensors((args, kwargs), partial(_replaced, made))
                unit = self.units[path]
                with nothing_outside(unit), torch.random.fork_rng(devices=[]), _without_saved_tensor_hooks():
                    result = twin._call_impl(*a, **k)  # type: ignore[no-untyped-call]
            except Exception as error:  # whatever a layer says that asks for values
                if where.type != "meta" or device.type == "meta":
                    raise CapabilityError(
                        f"{path} fails on zeros, by which other stages learn the shapes of what it returns: {error}"
                    ) from error
                continue
            return spec_of(result, [made[id(leaf)] for leaf in leaves]).changed(device=device)
        raise AssertionError

    def of_operation(
        self, func: Callable[..., Any], args: Any, kwargs: Any, leaves: Sequence[Tensor], depends: Callable[..., bool]
    ) -> ResultSpec:
        """Return what an operation of another stage returns, likewise, given which tensors one stage alone has."""
        single = (leaf for leaf in leaves if not leaf.dim() and not leaf.is_floating_point())
        numbers = {id(leaf): leaf.item() for leaf in single if not depends(leaf)}  # such as sizes
        key = func, torch.is_grad_enabled(), _autocast(), shapes_in((args, kwargs)), *numbers.values()
        return self._remembered(key, partial(self._try_operation, func, args, kwargs, leaves, numbers))

    def _try_operation(
        self, func: Callable[..., Any], args: Any, kwargs: Any, leaves: Sequence[Tensor], numbers: Mapping[int, Any]
    ) -> ResultSpec:
        meta, values = torch.device("meta"), pytree.tree_leaves((args, kwargs))
        if _autocast():
            meta = leaves[0].device
        made = {id(leaf): TensorSpec.of(leaf).zeros(meta) for leaf in leaves}
        made |= {id(leaf): torch.tensor(numbers[id(leaf)], dtype=leaf.dtype) for leaf in leaves if id(leaf) in numbers}
        asked = (value for value in values if isinstance(value, torch.device))
        device = next((leaf.device for leaf in leaves if leaf.is_meta), next(asked, leaves[0].device))
        a, k = _map_tensors((args, kwargs), lambda leaf: made[id(leaf)] if isinstance(leaf, Tensor) else meta)
        try:
            with _without_saved_tensor_hooks():
                result = func(*a, **k)
        except Exception as error:  # whatever an operation says that asks for values
            raise CapabilityError(
                f"{op_name(func)} of what another stage has gives shapes that depend on values{line_of_user()}: {error}"
            ) from error
        return spec_of(result, [made[id(leaf)] for leaf in leaves]).changed(device=device)


def _twin(unit: nn.Module, device: torch.device, precision: torch.dtype | None) -> nn.Module:
    """Return a copy of a module with zeros as weights."""
    full = {id(p) for p in kept_full(unit)}
    memo: dict[int, Any] = without_graphs(unit)
    for tensor in unit.parameters():
        low = precision is not None and tensor.dtype == torch.float32 and id(tensor) not in full
        zeros = torch.zeros(tensor.shape, dtype=precision if low else tensor.dtype, device=device)
        memo[id(tensor)] = nn.Parameter(zeros, tensor.requires_grad)
    for buffer in unit.buffers():
        memo[id(buffer)] = (
            buffer.detach().to(device, copy=True) if not buffer.is_meta else torch.zeros_like(buffer, device=device)
        )
    held = vars(unit).pop("_compiled_call_impl", None)
    try:
        twin = copy.deepcopy(unit, memo)
    finally:
        if held is not None:
            vars(unit)["_compiled_call_impl"] = held
    for module in twin.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return twin


def without_graphs(model: nn.Module) -> dict[int, Any]:
    """Return what deepcopy takes for tensors on a model that have a graph, such as an output that it has kept."""
    held = (leaf for module in model.modules() for leaf in pytree.tree_leaves(list(vars(module).values())))
    return {id(leaf): leaf.detach().clone() for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf}


def kept_full(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module that are not cast to a lower precision.

    They are those of layers with running statistics, such as BatchNorm: the statistics stay in float32, and torch
    computes on inputs of lower precision with parameters of the same format as the statistics.
    """
    for inner in module.modules():
        if isinstance(inner, _NormBase) and inner.running_mean is not None:
            yield from inner.parameters(recurse=False)


@contextmanager
def _without_saved_tensor_hooks() -> Iterator[None]:
    """Keep what is tried from those who watch what is saved for backwards, such as torch's checkpoint."""
    hooks: Any = torch._C._autograd
    held = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        held.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(held):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


def _replaced(made: Mapping[int, Any], leaf: Any) -> Any:
    return made.get(id(leaf), leaf)


def spec_of(result: Any, leaves: Sequence[Tensor]) -> ResultSpec:
    """Return the spec of a result, with numbers for the tensors that were there before."""
    known = list(leaves)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = next((place for place, given in enumerate(known) if given is leaf), None)
        if place is not None:
            return SameTensor(place)
        known.append(leaf)
        return TensorSpec.of(leaf)

    found, tree = pytree.tree_flatten(result)
    return ResultSpec([one(leaf) for leaf in found], tree)


def leaves_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree of containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves_in(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves_in(value)
    elif isinstance(tree, slice):
        yield from leaves_in((tree.start, tree.stop, tree.step))


def _map_tensors(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree with a function applied to its tensors and devices."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*map(one, (leaf.start, leaf.stop, leaf.step)))
        return function(leaf) if isinstance(leaf, Tensor | torch.device) else leaf

    return pytree.tree_map(one, tree)


def shapes_in(tree: Any) -> Any:
    """Return what the shapes of results depend on, as a key."""
    if isinstance(tree, Tensor):
        strides = tree.stride() if tree.layout == torch.strided else ()
        return tuple(tree.shape), strides, tree.dtype, tree.device, tree.requires_grad
    if isinstance(tree, dict):
        return tuple((key, shapes_in(value)) for key, value in tree.items())
    if isinstance(tree, tuple | list):
        return type(tree), *map(shapes_in, tree)
    if isinstance(tree, slice):
        return slice, shapes_in(tree.start), shapes_in(tree.stop), shapes_in(tree.step)
    return type(tree), tree


def _autocast() -> Any:
    """Return the formats that autocast casts to, by device; None where it is off."""
    kinds = ("cpu", "cuda")
    on = tuple(torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind))
    return on or None


def line_of_user() -> str:
    """Return the line of code that runs, outside of torch and Penstock, for messages."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in ("penstock", f"{'torch'}/", "contextlib")):
            return f" ({file}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def op_name(func: Any) -> str:
    return str(getattr(func, "__name__", func))
