"""Which blocks of a model are alike, so that one of them is measured for all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from penstock.measure.stage_trial import BlockInput, BlockPlace
from penstock.partition.blocks import LazyBlock
from penstock.stage.autograd.saved_bytes import signature

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)  # equal only to themselves
_OWN = vars(nn.Module()).keys() - {"training"}  # attributes that every module has
_DEEPEST = 8  # containers in each other


def kind_of(block: Any, place: BlockPlace, inputs: Mapping[int, BlockInput]) -> Hashable:
    """Return what is the same for two blocks that take the same time and memory.

    Blocks are alike if they stand in the same place, get inputs of the same shapes, and are built by the same function
    with the same arguments or are modules of the same classes with the same attributes and the same shapes.
    Attributes are compared as `_compared` says. Functions are alike only themselves.

    Args:
        block: as in a model; a lazy one is built without memory.
        place: where it stands.
        inputs: by microbatch size.
    """
    given = tuple((size, signature(each.value), each.wants) for size, each in inputs.items())
    return place, given, _described(block)


def title_of(block: Any) -> str:
    """Return what a block is, in a word: the name of its class or function."""
    if isinstance(block, LazyBlock):
        with torch.device("meta"):
            block = block.build()
    named = type(block) if isinstance(block, nn.Module) else block
    return str(getattr(named, "__name__", type(block).__name__))


def _described(block: Any) -> Hashable:
    """Return what tells blocks apart."""
    if isinstance(block, LazyBlock):
        build = block.build
        if isinstance(build, partial):
            key = build.func, build.args, tuple(sorted(build.keywords.items()))
            try:
                hash(key)
            except TypeError:
                pass
            else:
                return key
        with torch.device("meta"):
            block = build()
    if not isinstance(block, nn.Module):
        return _Itself(block)
    return tuple((name, type(part), _attributes(part), _shapes(part)) for name, part in block.named_modules())


def _attributes(module: nn.Module) -> Hashable:
    """Return what a module has besides its parameters, buffers and modules, such as a number of heads."""
    found = vars(module)
    return tuple((key, _compared(found[key])) for key in sorted(found.keys() - _OWN))


class _Itself:
    """Something that is equal to nothing but itself; keeps it, so that nothing else gets its address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same object."""
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        """Return a hash of the identity."""
        return id(self._value)


def _compared(value: Any, depth: int = 0) -> Hashable:
    """Return what is equal for two values that do the same to times and memory.

    Numbers and text count, tensors by shape, containers and dataclasses by what is in them, and everything else by
    identity: it may hold anything.
    """
    if isinstance(value, ref):
        value = value()
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
        return type(value), value
    if isinstance(value, Tensor):
        return type(value), tuple(value.shape), value.dtype, value.requires_grad
    inner: list[Any] | None = None
    if isinstance(value, (tuple, list)):
        inner = list(value)
    elif isinstance(value, dict):
        inner = [part for item in value.items() for part in item]
    elif isinstance(value, partial):
        inner = [value.func, value.args, value.keywords]
    elif is_dataclass(value):
        inner = [getattr(value, each.name, None) for each in fields(value)]
    if inner is None or depth == _DEEPEST:
        return _Itself(value)
    return type(value), tuple(_compared(each, depth + 1) for each in inner)


def _shapes(module: nn.Module) -> Hashable:
    """Return the shapes of a module's own parameters and buffers."""
    own: list[tuple[str, Tensor]] = [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]
    return tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in own)
