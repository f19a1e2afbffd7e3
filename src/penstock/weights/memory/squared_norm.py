"""The squared norm of gradients, whose bits do not depend on how stages and rows are divided among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 1 << 11  # numbers that Python adds in no time
_LOWEST, _EXPONENTS = -1073, 1024 + 1073 + 1  # of float64, as frexp counts
_COLUMNS = 1 << 14  # elements of a row whose norm is taken at once: torch divides longer ones among threads


class Squares(NamedTuple):
    """A sum of squares.

    Attributes:
        total: the sum; not finite if an element is not, or if their squares overflow.
        rest: its rounding error.
        elements: how many.
    """

    total: float = 0.0
    rest: float = 0.0
    elements: int = 0


@torch.no_grad()
def squared_norm(tensors: Iterable[Tensor]) -> Squares:
    """Return the sum of the squares of all elements.

    The norm of each row is computed in the precision of the tensor, row by row, so that it is the same wherever the
    other rows are. Their squares are added exactly, so that neither the division of a model into stages nor that of
    parameters into rows changes a sum.

    Args:
        tensors: of any shapes.
    """
    given = [tensor for tensor in tensors if tensor.numel()]
    if not given:
        return Squares()
    elements = sum(tensor.numel() for tensor in given)
    squares = torch.cat([part for tensor in given for part in _squares(tensor)])
    numbers = squares.tolist() if squares.numel() <= _FEW else _fewer(squares)
    about = sum(numbers)
    if not math.isfinite(about):
        return Squares(about, 0.0, elements)
    total = math.fsum(numbers)
    return Squares(total, math.fsum([*numbers, -total]), elements)


def _fewer(values: Tensor) -> list[float]:
    """Return a few numbers whose sum is exactly that of many, which are not negative; that is not finite if one is not.

    Upper and lower halves of the digits of all values with the same exponent add up without rounding. There is a place
    for every exponent, so that a GPU is waited for once.
    """
    digits, exponents = torch.frexp(values)  # from 1/2 to 1, of 53 bits
    places = (exponents.long() - _LOWEST).clamp(0, _EXPONENTS - 1)  # those of numbers that are not finite are anything
    upper = (digits * 2**27).floor()
    lower = (digits * 2**27 - upper) * 2**26
    sums = torch.zeros(2, _EXPONENTS, dtype=torch.float64, device=values.device)
    for half, part in zip(sums, (upper, lower), strict=True):
        half.index_add_(0, places, part)
    upper, lower, about = torch.split(
        torch.cat([sums.flatten(), values.sum().reshape(1)]).cpu(), [_EXPONENTS, _EXPONENTS, 1]
    )
    if not math.isfinite(about):
        return [float(about)]
    used = [
        (half, bits, place) for half, bits in zip((upper, lower), (27, 53), strict=True) for place in half.nonzero()
    ]
    return [math.ldexp(float(half[place]), int(place) + _LOWEST - bits) for half, bits, place in used]


def _squares(tensor: Tensor) -> list[Tensor]:
    """Return the squared norms of the rows of a tensor, of parts of them if they are long, in float64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dim() < 2:
        return [tensor.reshape(-1).double().square()]
    parts = torch.split(tensor.flatten(1), _COLUMNS, dim=1)
    return [torch.linalg.vector_norm(part, dim=1).double().square() for part in parts]
