"""The values of a forward that every block computes for itself: sizes of the input, and parts of buffers.

They cost next to nothing, and need not travel from one block to the next, where sizes could not go at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch.fx.node import Node

_SIZES = ("shape", "device", "dtype", "ndim")
_ASKS = ("size", "dim", "numel", "item", "tolist", "is_floating_point", "stride", "data_ptr")
_ALIKE = ("shape", "device", "ndim", "size", "dim", "numel")  # in every block, whatever the precision of what travels
_VIEWS = ("expand", "narrow", "permute", "select", "squeeze", "t", "transpose", "unsqueeze", "view")


def sizes_among(steps: Sequence[Node]) -> set[Node]:
    """Return the steps whose values are no tensors, but sizes and the like."""
    found: set[Node] = set()
    for step in steps:
        of_sizes = bool(step.all_input_nodes) and found.issuperset(step.all_input_nodes)
        if _asked(step) is not None or (of_sizes and _is_plain(step)):
            found.add(step)
    return found


def recomputed_among(
    steps: Sequence[Node], sizes: set[Node], model_input: Node, is_constant: Callable[[str], bool]
) -> set[Node]:
    """Return the steps that every block which needs their values can take itself, to the same bits.

    Args:
        steps: of a forward, none of which writes into what it gets.
        sizes: those whose values are no tensors.
        model_input: of the forward.
        is_constant: whether there is a buffer at a path that nothing in the model writes.
    """
    found: set[Node] = set()
    for step in steps:
        inputs, asked = step.all_input_nodes, _asked(step)
        known = bool(inputs) and all(
            node in found or (node.op == "get_attr" and is_constant(str(node.target))) for node in inputs
        )
        if asked in _ALIKE:
            same = known or inputs == [model_input]
        elif step in sizes:
            same = known and asked is None
        else:
            same = known and _is_view(step)
        if same:
            found.add(step)
    return found


def size_in_words(step: Node) -> str:
    """Return how a size was asked for, such as ``add(...).shape``."""
    while (asked := _asked(step)) is None and step.all_input_nodes:
        step = step.all_input_nodes[0]
    source = step.all_input_nodes[0] if step.all_input_nodes else step
    call = (
        source.name
        if source.op == "placeholder"
        else f"{source.target if source.op == 'call_module' else source.name}(...)"
    )
    return f"{call}.{asked}" + ("()" if step.op == "call_method" else "")


def _asked(step: Node) -> str | None:
    """What a step asks of a tensor; None if nothing of this kind."""
    if step.op == "call_method" and step.target in _ASKS:
        return str(step.target)
    if step.target is getattr and len(step.args) > 1 and step.args[1] in _SIZES:
        return str(step.args[1])
    return None


def _is_plain(step: Node) -> bool:
    modules = ("_operator", "math", "builtins")
    return step.op == "call_function" and getattr(step.target, "__module__", "") in modules


def _is_view(step: Node) -> bool:
    return step.target is operator.getitem or (step.op == "call_method" and step.target in _VIEWS)
