"""Trees of tensors as stages hand them to each other: their leaves, and copies without a graph.

Most are one tensor or a list of tensors, for which torch's walk over a tree would take longer than anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


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
