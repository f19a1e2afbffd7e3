"""The autograd graph of one forward through some blocks: opened at its inputs, and run backwards once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils import _pytree as pytree

from penstock.stage.autograd.activation_offload import ActivationOffload
from penstock.stage.autograd.deferred_weight_grads import DeferredWeightGrads


@dataclass
class Graph:
    """The autograd graph of one forward through some blocks, with everything its backward needs.

    Attributes:
        inputs: the received leaves that want a gradient, by their position in the input's tree.
        leaves: how many leaves the input's tree has.
        outputs: the edges at which gradients enter: those of the outputs, without their memory, or of the loss.
        seed: the gradient of the loss; None for a graph without one.
        nbytes: bytes that it keeps alive.
        deferred: the weight gradients that the first half of a split backward leaves to the second; None if not split.
        deferred_nbytes: the part of `nbytes` that stays alive until the second half.
        offload: moves its saved tensors away and back; None where nothing is ever moved.
        auxiliary: the losses that blocks have added, whose edges are the last: a zero like each, and its coefficient.
    """

    inputs: dict[int, Tensor]
    leaves: int
    outputs: list[GradientEdge | None]
    seed: Tensor | None
    nbytes: int
    deferred: DeferredWeightGrads | None = None
    deferred_nbytes: int = 0
    offload: ActivationOffload | None = None
    auxiliary: Sequence[tuple[Tensor, float]] = ()

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward (`run_backward`)."""
        return run_backward(self, gradients)


def open_inputs(value: Any, wants_gradient: Sequence[bool]) -> tuple[Any, dict[int, Tensor], int]:
    """Turn the received leaves that want a gradient into leaves of a new graph.

    Args:
        value: the input tree.
        wants_gradient: per leaf; leaves beyond its end want none.

    Returns:
        The tree, the new leaves by position, and the number of all leaves.
    """
    if type(value) is Tensor:  # a tree of one leaf, by far the most frequent
        if not any(wants_gradient):
            return value, {}, 1
        leaf = value.detach().requires_grad_()
        return leaf, {0: leaf}, 1
    leaves, spec = pytree.tree_flatten(value)
    opened: dict[int, Tensor] = {}
    for i, wants in enumerate(wants_gradient):
        if wants:
            leaves[i] = opened[i] = leaves[i].detach().requires_grad_()
    return pytree.tree_unflatten(leaves, spec), opened, len(leaves)


def run_backward(graph: Graph, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Run the backward through some blocks, once; weight gradients go where the leaves' `.grad` points.

    Args:
        graph: of the blocks.
        gradients: per output leaf, of its shape; None where no gradient came back.

    Returns:
        The gradients of all input leaves, None where none is wanted.
    """
    edges: list[GradientEdge] = []
    given: list[Tensor] = []
    for edge, gradient in zip(graph.outputs, gradients, strict=True):
        if edge is not None and gradient is not None:
            edges.append(edge)
            given.append(gradient)
    raw: dict[int, Tensor] = {}
    for place, leaf in graph.inputs.items():  # each leaf dies with its graph, so no hook need be removed
        keep = partial(_keep_raw, raw, place, leaf.stride())
        if leaf._backward_hooks:  # a block has registered one on its input
            leaf.register_hook(keep)  # type: ignore[no-untyped-call]
        else:  # what register_hook does, but for the handle to remove the hook
            leaf._backward_hooks = OrderedDict({0: keep})
    if edges:
        # What torch.autograd.backward calls, without its checks of shapes in Python: the engine makes them again.
        _engine_run_backward(tuple(edges), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True)
    result: list[Tensor | None] = [None] * graph.leaves
    for place, leaf in graph.inputs.items():
        result[place] = raw.pop(place, leaf.grad)
        leaf.grad = None
    return result


def _keep_raw(raw: dict[int, Tensor], place: int, strides: tuple[int, ...], gradient: Tensor) -> None:
    """Keep a gradient as it is where autograd would give it the strides of its leaf, as it would in an uncut graph."""
    if gradient.stride() != strides:
        raw[place] = gradient
