"""Dataclasses and named tuples in the trees that travel between stages.

Torch's pytrees take a named tuple apart, but not a dataclass, and can write down neither. So a dataclass is registered
there when one is first seen, and both travel by their names: the receiver looks the class up among its own modules.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def open_dataclasses(tree: Any) -> None:
    """Let torch's pytrees take the dataclasses of a tree apart."""
    while not isinstance(tree, Tensor):
        found = {type(leaf) for leaf in pytree.tree_leaves(tree) if _is_dataclass(leaf)}
        if not found:
            return
        for cls in found:
            _register_dataclass(cls)


def register_classes(spec: pytree.TreeSpec) -> list[str]:
    """Register the named tuples of a tree, so that it can be written down, and return the names of the tree's classes.

    Raises:
        NotImplementedError: a receiver could not find a class by its name.
    """
    names = []
    for cls in dict.fromkeys(_classes(spec)):
        name = _name(cls)
        if cls not in pytree.SUPPORTED_SERIALIZED_TYPES:
            pytree._register_namedtuple(cls, serialized_type_name=name)
        if pytree.SUPPORTED_SERIALIZED_TYPES[cls].serialized_type_name == name:  # not registered by the user
            if _find(name) is not cls:
                raise NotImplementedError(
                    f"{name} cannot be found by its name; define the class at the top of a module, not in a function"
                )
            names.append(name)
    return names


def find_classes(names: list[str]) -> None:
    """Register the classes of a tree that was received.

    Raises:
        NotImplementedError: this process has no such class.
    """
    for name in names:
        cls = _find(name)
        if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or _is_namedtuple(cls)):
            raise NotImplementedError(f"there is no dataclass or named tuple {name} in this process")
        if cls in pytree.SUPPORTED_SERIALIZED_TYPES:
            continue
        if dataclasses.is_dataclass(cls):
            _register_dataclass(cls)
        else:
            pytree._register_namedtuple(cls, serialized_type_name=name)


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | Tensor) and not _unset(type(leaf))


def _unset(cls: type) -> list[str]:
    """The fields of a dataclass that its constructor does not set: it could not be made again."""
    return [field.name for field in dataclasses.fields(cls) if not field.init]


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _register_dataclass(cls: type) -> None:
    pytree.register_dataclass(cls, serialized_type_name=_name(cls))


def _classes(spec: pytree.TreeSpec) -> Iterator[type]:
    """Yield the dataclasses and named tuples of a tree."""
    for cls in (spec.type, spec.context):
        if isinstance(cls, type) and (dataclasses.is_dataclass(cls) or _is_namedtuple(cls)):
            yield cls
    for child in spec.children():
        yield from _classes(child)


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> Any:
    """The class of a name, among the modules that are loaded; None if there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
