"""The structure of a message: its tree and the kinds of its leaves, which travel as JSON when they change."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.message.memory_order import dimensions_by_stride
from penstock.comm.message.tensor_message import TensorMessage
from penstock.comm.message.tree_classes import find_classes, register_classes
from penstock.errors import CapabilityError, TransportError

Structure = tuple[pytree.TreeSpec, list[list[Any]], tuple[bool, ...]]
"""The tree, the kind of each leaf, and whether each leaf requires a gradient."""


def structure_of(message: TensorMessage, where: str) -> Structure:
    """Describe a message's tree and tensors, without the header and the contents.

    Raises:
        CapabilityError: a leaf is neither a tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten(message.tree)
    kinds: list[list[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            check_dense(leaf, where)
            dtype = str(leaf.dtype).removeprefix("torch.")
            kinds.append(["tensor", dtype, list(leaf.shape), dimensions_by_stride(leaf)])
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kinds.append(["value", leaf, repr(leaf)])  # False == 0 and 0.0 == -0.0, but not as text
        else:
            raise CapabilityError(
                f"{where}: a block returned a {type(leaf).__name__}; between stages only tensors, numbers, strings and "
                "None can travel, in any nesting of dicts, lists, tuples and dataclasses whose fields are all arguments"
            )
    return spec, kinds, message.wants_gradient


def form_of(message: TensorMessage) -> tuple[Any, ...] | None:
    """A key that equals only for messages of the same structure, found without a walk; None where there is none.

    There is one for a tensor, and for a list of tensors and None.
    """
    tree = message.tree
    if isinstance(tree, Tensor):
        return tree.dtype, tree.shape, tree.stride(), message.wants_gradient
    if type(tree) is not list:
        return None
    forms: list[Any] = []
    for leaf in tree:
        if isinstance(leaf, Tensor):
            forms.append((leaf.dtype, leaf.shape, leaf.stride()))
        elif leaf is None:
            forms.append(None)
        else:
            return None
    return (*forms, message.wants_gradient, len(tree))


def check_dense(tensor: Tensor, where: str) -> None:
    """Refuse a tensor that is not one block of memory.

    Raises:
        CapabilityError: it is sparse or nested.
    """
    if tensor.is_nested:
        raise CapabilityError(
            f"{where}: a block returned a nested tensor, but between stages only dense ones can travel; return a "
            "padded tensor and the lengths, or its values() and offsets(), or cut the model elsewhere (partition)"
        )
    if tensor.layout is not torch.strided:
        raise CapabilityError(
            f"{where}: a block returned a sparse tensor ({tensor.layout}), but between stages only dense ones can "
            "travel; return to_dense(), or its indices and values, or cut the model elsewhere (partition)"
        )


def dump_structure(structure: Structure, where: str) -> bytes:
    """Encode a structure as JSON.

    Raises:
        CapabilityError: it cannot be rebuilt from JSON.
    """
    spec, kinds, wants = structure
    try:
        classes = register_classes(spec)
        text = pytree.treespec_dumps(spec)
        if pytree.treespec_loads(text) != spec:
            raise NotImplementedError("keys of dicts must be strings or numbers, not tuples")
    except (NotImplementedError, TypeError, ValueError) as error:
        raise CapabilityError(
            f"{where}: a block returned a structure that cannot travel between stages: {error}; use dicts, lists, "
            "tuples and dataclasses, or register the class with a serialized name in torch.utils._pytree on every rank"
        ) from None
    return json.dumps([text, kinds, [int(w) for w in wants], classes], separators=(",", ":")).encode()


def parse_structure(description: bytes, where: str) -> Structure:
    """Decode what `dump_structure` has encoded.

    Raises:
        TransportError: it is something else, or names a class that this process does not have.
    """
    try:
        spec, kinds, wants, classes = json.loads(description)
        find_classes(classes)
        return pytree.treespec_loads(spec), kinds, tuple(map(bool, wants))
    except (ValueError, NotImplementedError) as error:
        raise TransportError(f"{where}: cannot read the structure of a message: {error}") from None


def described_tensors(description: bytes, where: str) -> list[tuple[torch.dtype, list[int]]]:
    """Return types and shapes, as they lie in memory, of the tensors of a message with a described structure."""
    _, kinds, _ = parse_structure(description, where)
    found = [(getattr(torch, k[1]), k[2], k[3]) for k in kinds if k[0] == "tensor"]
    return [(dtype, shape if order is None else [shape[d] for d in order]) for dtype, shape, order in found]
