"""Walks over autograd graphs: the edges of outputs, the nodes behind them, the leaves that they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree


def edges_of(value: Any) -> list[GradientEdge | None]:
    """The edge at which a gradient enters the graph of each leaf of a tree; None for leaves without a graph."""
    if type(value) is Tensor:
        return [get_gradient_edge(value) if value.requires_grad else None]
    leaves = pytree.tree_leaves(value)
    return [get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]


def trained_leaves(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in whose `.grad` a backward from the leaves of `value` would accumulate."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
    yield from (t for t in tensors if t.grad_fn is None)
    yield from (node.variable for node in graph_nodes(value) if type(node).__name__ == "AccumulateGrad")


def leaf_of(tensor: Tensor) -> Tensor | None:
    """Return the leaf that a tensor stands for in graphs: itself, or that of which it is another object."""
    node: Any = get_gradient_edge(tensor).node
    if type(node).__name__ == "AliasBackward0":
        node = node.next_functions[0][0]
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def graph_nodes(value: Any) -> Iterator[Any]:
    """Yield every node of the graph behind the leaves of `value`."""
    rest: list[Any] = [leaf.grad_fn for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        rest += [following for following, _ in node.next_functions]
