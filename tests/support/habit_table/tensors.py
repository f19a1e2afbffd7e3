"""Habits with what travels between blocks and stages: trees, and tensors of all kinds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from support.habits import WIDTH, Refused, Script, habit, linear, regression

TREES = "Between stages: trees"
TENSORS = "Between stages: kinds of tensors"
F64 = torch.float64


class Wrapped(nn.Module):
    """A layer, and what a function makes of its output."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = linear(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


class Unwrapped(nn.Module):
    """What a function makes of a tree, and a layer."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = linear(), function

    def forward(self, tree: Any) -> Tensor:
        found: Tensor = self.layer(self.function(tree))
        return found


def across(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Script:
    """What one block packs travels to the next stage, whose first block unpacks it."""
    blocks = {"first": linear(), "pack": Wrapped(pack), "unpack": Unwrapped(unpack), "head": linear()}
    return Script(blocks, regression())


@habit(TREES)
def tuples() -> Script:
    """Tuples, lists, dicts, `OrderedDict`."""
    return across(
        lambda x: (x, [x + 1, {"a": x * 2}], OrderedDict(b=x * 3)),
        lambda tree: tree[0] + tree[1][0] + tree[1][1]["a"] + tree[2]["b"],
    )


class Pair(NamedTuple):
    """A named tuple."""

    x: Tensor
    scale: Tensor | float


@habit(TREES)
def named_tuples() -> Script:
    """Named tuples."""
    return across(lambda x: Pair(x, 2.0), lambda pair: pair.x * pair.scale)


@dataclass
class State:
    """A dataclass."""

    x: Tensor
    pair: Pair
    label: str = "none"
    more: Any = None


@habit(TREES)
def dataclasses() -> Script:
    """Dataclasses."""
    return across(
        lambda x: State(x, Pair(x + 1, x * 2), "some"), lambda state: state.x * state.pair.x + state.pair.scale
    )


@habit(TREES)
def plain_values() -> Script:
    """Numbers, strings, bools, None next to tensors."""
    return across(
        lambda x: {"x": x, "n": 2, "half": 0.5, "name": "a", "on": True, "none": None}, lambda d: d["x"] * d["n"]
    )


@habit(TREES)
def packed_across() -> Script:
    """`PackedSequence`."""

    def pack(x: Tensor) -> Any:
        return nn.utils.rnn.pack_padded_sequence(x[:, None], [1] * x.shape[0], batch_first=True)

    return across(pack, lambda packed: nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0][:, 0])


@habit(TREES)
def sizes() -> Script:
    """`torch.Size` next to tensors."""
    return across(lambda x: (x, x.shape), lambda pair: pair[0].reshape(pair[1]))


@habit(TREES)
def nothing_trained() -> Script:
    """A first stage without parameters."""
    blocks = {"first": nn.Identity(), "second": torch.tanh, "third": linear(), "head": linear()}
    return Script(blocks, regression())


@habit(TREES)
def weight_across() -> Script:
    """A parameter, a view of it or a buffer as part of the output of a stage."""
    blocks = {
        "first": linear(),
        "pack": WithWeight(),
        "unpack": Unwrapped(lambda t: t[0] * t[1] + t[2][0]),
        "head": linear(),
    }
    return Script(blocks, regression())


class WithWeight(nn.Module):
    """Returns its weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(WIDTH, dtype=F64)), linear()
        self.register_buffer("shift", torch.ones(1, dtype=F64))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), self.scale, self.layer.weight.T, self.shift


class Opaque:
    """An object that torch knows nothing of."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


OPAQUE = "torch does not know what is inside; use a dataclass, or register the class in `torch.utils._pytree`"


@habit(TREES, Refused("Opaque", OPAQUE))
def own_objects() -> Script:
    """Objects of one's own class."""
    return across(Opaque, lambda found: found.x)


@habit(TREES)
def same_tensor_twice() -> Script:
    """The same tensor twice in a tuple."""
    return across(lambda x: (x, x), lambda pair: pair[0] * pair[1])


# --- tensors ----------------------------------------------------------------------------------------------------------


@habit(TENSORS)
def complex_numbers() -> Script:
    """Complex activations."""
    return across(lambda x: torch.fft.fft(x), lambda x: x.abs() + x.angle().cos())


@habit(
    TENSORS, newest=Refused("complex", "rules that look weights up are offered for real parameters; use stash or 2bw")
)
def complex_weights() -> Script:
    """Complex parameters."""
    return Script(
        {"first": linear(), "in": ComplexLayer(), "out": ComplexLayer(), "head": nn.Sequential(Real(), linear())},
        regression(),
    )


class ComplexLayer(nn.Module):
    """A matrix of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex128) @ self.weight


class Real(nn.Module):
    """The absolute values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


@habit(TENSORS)
def masks() -> Script:
    """bool and int8 tensors next to activations."""
    return across(lambda x: (x, x > 0, (x * 5).to(torch.int8)), lambda t: torch.where(t[1], t[0], t[0] * 2) + t[2])


@habit(TENSORS)
def strided() -> Script:
    """Transposed, expanded and sliced tensors, scalars, tensors without elements."""
    return across(
        lambda x: (x.t(), x[:, :1].expand(-1, WIDTH), x[:, ::2], x.mean(), x[:0]),
        lambda t: t[0].t() + t[1] + t[2].sum(1, keepdim=True) + 0 * t[3] + t[4].sum(),
    )


DENSE = "messages hold dense tensors; send values and indices, or `to_dense()`"


@habit(TENSORS, Refused("to_dense", DENSE))
def sparse() -> Script:
    """Sparse tensors (COO)."""
    return across(lambda x: x.to_sparse(), lambda x: x.to_dense())


@habit(TENSORS, Refused("to_dense", DENSE))
def sparse_csr() -> Script:
    """Sparse tensors (CSR)."""
    return across(lambda x: x.to_sparse_csr(), lambda x: x.to_dense())


@habit(TENSORS, Refused("nested", "messages hold dense tensors; send a padded tensor and the lengths"))
def nested() -> Script:
    """Nested tensors."""
    return across(
        lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged),
        lambda x: torch.nested.to_padded_tensor(x, 0.0),
    )


@habit(TENSORS)
def sparse_inside() -> Script:
    """Sparse tensors within a block."""
    return across(lambda x: torch.sparse.mm(torch.eye(x.shape[0], dtype=F64).to_sparse(), x), lambda x: x)


class Tagged(Tensor):
    """A subclass of tensors."""


@habit(TENSORS)
def subclass() -> Script:
    """A subclass of `Tensor`."""
    return across(lambda x: x.as_subclass(Tagged), lambda x: x.as_subclass(Tensor))
