"""Stand-ins for tensors of other stages: shapes and types without values, on which every computation is an error."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What other stages know of a tensor.

    Attributes:
        shape, strides, dtype, device, requires_grad: of the tensor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return that of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def zeros(self, device: torch.device) -> Tensor:
        """Return such a tensor on another device, full of zeros."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        if device.type != "meta":
            made.zero_()
        return made.requires_grad_() if self.requires_grad else made


@dataclass(frozen=True, slots=True)
class SameTensor:
    """Stands for a tensor of a result that is one of the arguments, or one of its tensors before.

    Attributes:
        place: its number among them.
    """

    place: int


@dataclass(frozen=True, slots=True)
class ResultSpec:
    """A result without the values of its tensors. Containers that look at what is put into them are not made of specs.

    Attributes:
        leaves: of the result, with a `TensorSpec` or a `SameTensor` in the place of each tensor.
        tree: how they are contained in each other.
    """

    leaves: list[Any]
    tree: pytree.TreeSpec

    def changed(self, **changes: Any) -> ResultSpec:
        """Return one whose tensors are changed."""
        return ResultSpec([replace(f, **changes) if isinstance(f, TensorSpec) else f for f in self.leaves], self.tree)


def result_as_text(spec: ResultSpec) -> str:
    """Return a result without the values of its tensors as text, to be sent.

    Raises:
        CapabilityError: it has something else than tensors and plain values.
    """
    plain: list[Any] = []
    for leaf in spec.leaves:
        if isinstance(leaf, TensorSpec):
            shape = [list(leaf.shape), list(leaf.strides)]
            plain.append([*shape, str(leaf.dtype).removeprefix("torch."), leaf.requires_grad])
        elif isinstance(leaf, SameTensor):
            plain.append([leaf.place])
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            plain.append(leaf)
        else:
            raise CapabilityError(f"a {type(leaf).__name__} cannot be sent to other stages; let it be a tensor")
    _name_types(spec.tree)
    return json.dumps([pytree.treespec_dumps(spec.tree), plain])


def _name_types(tree: pytree.TreeSpec) -> None:
    """Let torch write named tuples, such as PackedSequence, by their names: all ranks record the same forward."""
    kind = tree.context
    if tree.type is namedtuple and kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    for child in tree.children():
        _name_types(child)


def result_of_text(text: str, device: torch.device) -> ResultSpec:
    """Return the result that was made text."""
    tree, plain = json.loads(text)
    leaves: list[Any] = []
    for leaf in plain:
        if isinstance(leaf, list) and len(leaf) == 1:
            leaf = SameTensor(*leaf)
        elif isinstance(leaf, list):
            shape, strides, dtype, requires_grad = leaf
            leaf = TensorSpec(tuple(shape), tuple(strides), getattr(torch, dtype), device, requires_grad)
        leaves.append(leaf)
    return ResultSpec(leaves, pytree.treespec_loads(tree))


class Placeholder(Tensor):
    """A tensor of another stage.

    Args:
        spec: of the tensor.
        origin: the unit or operation that makes it, for messages.
    """

    origin: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Placeholder], spec: TensorSpec, origin: str) -> Placeholder:
        """Make one without memory."""
        made: Placeholder = Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.strides, dtype=spec.dtype, device=spec.device,
            requires_grad=spec.requires_grad,
        )  # fmt: skip
        made.origin = origin
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Refuse every computation."""
        found = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Placeholder))
        raise CapabilityError(
            f"{func} takes the value of {found.origin}, which belongs to another stage, in a way that cannot be seen"
        )

    def __repr__(self, *_: object, **__: object) -> str:  # type: ignore[override]
        """Say what it stands for."""
        return f"Placeholder({self.origin}, {tuple(self.shape)}, {self.dtype})"


_OPERATORS = """
add radd sub rsub mul rmul truediv rtruediv pow neg abs lt le gt ge eq ne bool int float index len iter getitem setitem
contains call format str repr
"""


class Unknown:
    """What code around units has left, in the part of a forward that a stage could not follow.

    Args:
        name: of it.
    """

    def __init__(self, name: str) -> None:
        self.__name = name

    def __refuse(self, *_: Any) -> Any:
        stack: Any = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if stack and hasattr(stack[-1], "end"):
            stack[-1].end()
        raise CapabilityError(
            f"code between layers takes {self.__name}, which an earlier forward has changed in a way that depends on "
            "what later stages compute; let it be a tensor, or put it into a layer"
        )

    __getattr__ = __refuse
    for _name in _OPERATORS.split():
        locals()[f"__{_name}__"] = __refuse
    __hash__ = None  # type: ignore[assignment]
