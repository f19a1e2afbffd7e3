"""Trees of tensors as stages hand them to each other: their leaves, and copies without a graph.

Most are one tensor or a list of tensors, for which torch's walk over a tree would take longer than anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

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
