"""Trees of tensors as stages hand them to each other: their leaves, classes and layouts in memory.

Most are one tensor or a list of tensors, for which torch's walk over a tree would take longer than anything else.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Whole:
    """A part of a batch that belongs to no sample, such as a mask or a table: it goes whole to every microbatch.

    Args:
        value: a tensor, or anything else; blocks and loss get it as it is.
        dim: the dimension of samples, of a target that has them elsewhere than in the first one.
    """

    def __init__(self, value: Any, dim: int | None = None) -> None:
        self.value, self.dim = value, dim


pytree.register_pytree_node(
    Whole, lambda whole: ([whole.value], whole.dim), lambda parts, dim: Whole(next(iter(parts)), dim)
)


def is_marked(value: Any) -> bool:
    """Whether a value is marked as one that samples have in common."""
    return isinstance(value, Whole)


def without_marks(tree: Any) -> Any:
    """Take out of a tree of a microbatch what `Whole` says of its parts."""
    if isinstance(tree, Tensor):
        return tree
    return pytree.tree_map(lambda leaf: leaf.value if is_marked(leaf) else leaf, tree, is_leaf=is_marked)


def sample_dims(tree: Any) -> Iterator[tuple[Tensor, int | None]]:
    """Yield the tensors of a microbatch, each with its dimension of samples, None if it has none."""
    for leaf in leaves_of(tree) if isinstance(tree, Tensor) else pytree.tree_leaves(tree, is_leaf=is_marked):
        value, dim = (leaf.value, leaf.dim) if is_marked(leaf) else (leaf, 0)
        for tensor in leaves_of(value):
            if isinstance(tensor, Tensor):
                yield tensor, dim if tensor.dim() else None


def count_samples(output: Any, target: Any) -> int | None:
    """Return how many samples a microbatch has, by its target or, if that has none, by the output; or None."""
    dims = (*sample_dims(target), *sample_dims(output))
    found = (leaf.shape[dim] for leaf, dim in dims if dim is not None)
    lists = (len(leaf) for leaf in pytree.tree_leaves(target, is_leaf=_is_list_of_values) if _is_list_of_values(leaf))
    return next(found, next(lists, None))


def sample_size(output: Any, target: Any, samples: float) -> float:
    """Return a number for the shapes of a microbatch, but for that of its samples: the elements of one, if alone."""
    leaves = [leaf for leaf, dim in (*sample_dims(target), *sample_dims(output)) if dim is not None]
    sizes = [leaf.numel() / samples for leaf in leaves if any(length % samples == 0 for length in leaf.shape)]
    return sum(size * math.pi**k for k, size in enumerate(sizes))


def _is_list_of_values(value: Any) -> bool:
    """Whether it is a list without tensors, such as of texts."""
    if type(value) not in (list, tuple):
        return False
    leaves = pytree.tree_leaves(value, is_leaf=is_marked)
    return bool(leaves) and not any(hasattr(leaf, "shape") or is_marked(leaf) for leaf in leaves)


def picked(tree: Any, samples: int, which: Sequence[int], dim: int = 0, *, slices: bool = False) -> Any:
    """Return a microbatch with some of its samples, along the dimension that marks say.

    Args:
        tree: of the microbatch.
        samples: how many it has. A dimension may have several places for each.
        which: the samples to take; one may come twice.
        dim: of samples, where no mark says another one.
        slices: they are slices, along `dim` of marked tensors, too.
    """

    def taken(leaf: Any) -> Any:
        if is_marked(leaf):
            along = dim if slices and leaf.dim is not None else leaf.dim
            return leaf if along is None else Whole(places(leaf.value, along), leaf.dim)
        if _is_list_of_values(leaf):
            return [leaf[k] for k in which] if len(leaf) == samples and not slices else leaf
        return places(leaf, dim)

    def places(leaf: Any, along: int) -> Any:
        shape = getattr(leaf, "shape", ())
        if len(shape) <= along or shape[along] % samples:
            return leaf
        each = shape[along] // samples
        return leaf[(slice(None),) * along + ([k * each + i for k in which for i in range(each)],)]

    return pytree.tree_map(taken, tree, is_leaf=lambda value: is_marked(value) or _is_list_of_values(value))


def leaves_of(tree: Any) -> Sequence[Any]:
    """The leaves of a pytree; without a walk where it is a tensor, or a list or tuple of tensors and None."""
    if isinstance(tree, Tensor):
        return (tree,)
    if type(tree) in (list, tuple):
        for leaf in tree:
            if leaf is not None and not isinstance(leaf, Tensor):
                break
        else:
            return tree  # type: ignore[no-any-return]
    return pytree.tree_leaves(tree)


def tree_of(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Make a tree of its leaves; without torch's walk, which is slow, where it is one leaf or a list of leaves."""
    if spec.num_nodes == len(leaves) == 1:
        return leaves[0]
    flat = spec.type is list and spec.num_nodes == len(leaves) + 1
    return leaves if flat else pytree.tree_unflatten(leaves, spec)


def detached(tree: Any) -> tuple[Any, tuple[bool, ...]]:
    """Detach the tensors of a pytree from their graph; also return which of its leaves want a gradient."""
    if isinstance(tree, Tensor):
        return tree.detach(), (tree.requires_grad,)
    leaves, spec = pytree.tree_flatten(tree)
    wants = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(plain, spec), wants


# Dataclasses and named tuples in the trees that travel between stages.
#
# Torch's pytrees take a named tuple apart, but not a dataclass, and can write down neither. So a dataclass is
# registered there when one is first seen, and both travel by their names: the receiver looks the class up among its own
# modules.


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


def dimensions_by_stride(tensor: Tensor) -> list[int] | None:
    """The dimensions by decreasing stride; None if they are so already, or if the tensor has gaps."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor whose dimensions are in the order of its memory."""
    order = dimensions_by_stride(tensor)
    return tensor if order is None else tensor.permute(order)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor into the layout that it would have after transport: kernels may round differently by strides."""
    order = dimensions_by_stride(tensor)
    if order is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    dense = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return fetch_laid([list(tensor.shape), order], lambda _: dense)


def fetch_laid(form: list[Any], fetch: Callable[[list[int]], Tensor]) -> Tensor:
    """Fetch a tensor whose memory has its dimensions in another order.

    Args:
        form: its shape, and the order of its dimensions in memory (None: as they are).
        fetch: given the shape as it lies in memory, returns the tensor.
    """
    shape, order = form
    if order is None:
        return fetch(shape)
    places = sorted(range(len(order)), key=order.__getitem__)
    return fetch([shape[d] for d in order]).permute(places)
