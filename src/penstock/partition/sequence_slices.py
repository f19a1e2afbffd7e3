"""Slices of sequences: their lengths, and blocks that carry state from one slice to the next.

A block that reads other tokens of a sequence has a method `forward_slice(x, carry) -> (y, carry)`: x is its input for
one slice, carry the value it returned for the slice before (None for the first), such as keys and values, in any
nesting of dicts, lists and tuples. The gradient of the carry flows back the same way. Other blocks must declare that
they process each token separately: `tokenwise = True`; for torch's own modules this is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.comm.p2p.trees import Whole, is_marked
from penstock.errors import ConfigError, DataError
from penstock.repr_without_defaults import ShortRepr

_TOKENWISE = (
    nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU,
    nn.ELU, nn.Softplus,
)  # fmt: skip
Lengths = Callable[[int, int], Sequence[int]]
"""(length of a sequence, number of slices) -> length of each slice."""


def equal_lengths(length: int, slices: int) -> list[int]:
    """Return lengths that are as equal as possible, longer ones first."""
    return [length // slices + (j < length % slices) for j in range(slices)]


def equal_time_lengths(quadratic: float) -> Lengths:
    """Return a function for slices of equal time under causal attention (Seq1F1B, arXiv 2406.03488, sec. on partition).

    Args:
        quadratic: q, where the first n tokens of a sequence cost n + q n^2 in any unit; 1 / (12 d) for a transformer of
            width d whose layers have 12 d^2 weights.
    """

    def lengths(length: int, slices: int) -> list[int]:
        def cost(n: int) -> float:
            return n + quadratic * n * n

        borders = [0]
        for j in range(1, slices):
            wanted, last = cost(length) * j / slices, length - (slices - j)
            reachable = range(borders[-1] + 1, last + 1)
            borders.append(min(reachable, key=lambda n: abs(cost(n) - wanted)))
        return [end - begin for begin, end in zip(borders, [*borders[1:], length], strict=True)]

    return lengths


@dataclass(frozen=True, repr=False)
class Slicing(ShortRepr):
    """How the sequences of a microbatch are divided into slices.

    Attributes:
        dimension: the dimension of the sequence, in every tensor of inputs and targets that has it.
        lengths: a function, (length of the sequence, number of slices) -> the length of each slice.
    """

    dimension: int = 1
    lengths: Lengths = equal_lengths

    def part(self, tree: Any, piece: tuple[int, int]) -> Any:
        """Return slice j of k of every tensor.

        Raises:
            DataError: a sequence is shorter than the number of slices.
        """
        number, slices = piece

        def part(leaf: Any) -> Any:
            if isinstance(leaf, Whole) and leaf.dim is not None:
                return Whole(part(leaf.value), leaf.dim)
            if not isinstance(leaf, Tensor) or leaf.dim() <= self.dimension:
                return leaf
            length = leaf.shape[self.dimension]
            lengths = list(self.lengths(length, slices)) if length >= slices else []
            if len(lengths) != slices or sum(lengths) != length or min(lengths) < 1:
                raise DataError(f"a sequence of {length} cannot be cut into {slices} slices of lengths {lengths}")
            return leaf.narrow(self.dimension, [0, *accumulate(lengths)][number], lengths[number])

        return pytree.tree_map(part, tree, is_leaf=is_marked)


EQUAL_SLICES = Slicing()


def check_sliceable(blocks: Mapping[str, Any], where: str) -> None:
    """Raise an error if a block does not declare how it processes slices.

    Raises:
        ConfigError: a block does not.
    """
    for name, block in blocks.items():
        if not hasattr(block, "forward_slice") and not _is_tokenwise(block):
            raise ConfigError(
                f"{where}: block {name!r} does not declare how it processes a slice of a sequence. If it reads other "
                "tokens, give it forward_slice(x, carry) -> (y, carry); if not, set tokenwise = True on it"
            )


def _is_tokenwise(block: Any) -> bool:
    said = getattr(block, "tokenwise", None)
    if said is not None:
        return bool(said)
    if not any(_runs_as(block, kind) for kind in (nn.Sequential, nn.LayerNorm, nn.RMSNorm, *_TOKENWISE)):
        return False
    if isinstance(block, nn.Sequential):
        return all(map(_is_tokenwise, block))
    return not isinstance(block, nn.LayerNorm | nn.RMSNorm) or len(block.normalized_shape) == 1


def _runs_as(block: Any, kind: type[nn.Module]) -> bool:
    """Return whether a block is a module of a kind with the unmodified forward of that kind."""
    return isinstance(block, kind) and type(block).forward is kind.forward and "forward" not in vars(block)


Carry = tuple[Any, tuple[bool, ...]]
"""A tree of detached values, and which of its leaves need a gradient."""
NOTHING: Carry = ({}, ())


def with_carry(value: Any, wants: Sequence[bool], carry: Carry) -> tuple[Any, tuple[bool, ...]]:
    """Return the input of a slice together with the carried values, and which leaves need a gradient."""
    missing = len(pytree.tree_leaves(value)) - len(wants)  # the model's own input needs none
    return (value, carry[0]), (*wants, *[False] * missing, *carry[1])


def storages(carry: Carry) -> set[int]:
    """Return the identities of the storages of its tensors."""
    return {t.untyped_storage()._cdata for t in pytree.tree_leaves(carry[0]) if isinstance(t, torch.Tensor)}
