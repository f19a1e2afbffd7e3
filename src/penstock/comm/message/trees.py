"""Trees of tensors as stages hand them to each other: their leaves, and copies without a graph.

Most are one tensor or a list of tensors, for which torch's walk over a tree would take longer than anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def doubled(tree: Any, dim: int = 0, *, slices: bool = False) -> Any:
    """Return a microbatch with each of its samples twice, those of targets where marks say; or each of its slices."""

    def doubled(leaf: Any) -> Any:
        if is_marked(leaf):
            along = dim if slices else leaf.dim
            return leaf if leaf.dim is None else Whole(torch.cat((leaf.value, leaf.value), along), leaf.dim)
        return torch.cat((leaf, leaf), dim) if isinstance(leaf, Tensor) and leaf.dim() > dim else leaf

    return pytree.tree_map(doubled, tree, is_leaf=is_marked)


def part(tree: Any, samples: int, second: int, dim: int = 0) -> Any:
    """Return the first or the second half of the samples of a microbatch, along the dimension that marks say.

    Args:
        tree: of the microbatch.
        samples: how many it has.
        second: 1 for the second half.
        dim: of samples, where no mark says another one. A dimension may have several places for each sample.
    """

    def taken(leaf: Any) -> Any:
        if is_marked(leaf):
            return leaf if leaf.dim is None else Whole(halved(leaf.value, leaf.dim), leaf.dim)
        return halved(leaf, 0 if type(leaf) is list else dim)

    def halved(leaf: Any, along: int) -> Any:
        shape = (len(leaf),) if type(leaf) is list else getattr(leaf, "shape", ())
        if len(shape) <= along or shape[along] % samples:
            return leaf
        middle = (samples + 1) // 2 * (shape[along] // samples)
        kept = slice(middle, None) if second else slice(middle)
        return leaf[kept] if type(leaf) is list else leaf[(slice(None),) * along + (kept,)]

    def texts(value: Any) -> bool:
        plain = type(value) is list and len(value) == samples
        return plain and not any(hasattr(leaf, "shape") for leaf in pytree.tree_leaves(value))

    return pytree.tree_map(taken, tree, is_leaf=lambda value: is_marked(value) or texts(value))


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
