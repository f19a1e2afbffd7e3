"""The squared norm of gradients, whose bits do not depend on how stages and rows are divided among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_FEW = 1 << 11  # numbers that Python adds in no time
_COLUMNS = 1 << 14  # elements of a row whose norm is taken at once: torch divides longer ones among threads


@torch.no_grad()
def squared_norm(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Return the sum of the squares of all elements; not finite if one is not, or if their squares overflow.

    The norm of each row is computed in the precision of the tensor, row by row, so that it is the same wherever the
    other rows are. Their squares are added exactly and returned as (sum, rounding error), so that neither the division
    of a model into stages nor that of parameters into rows changes a sum.

    Args:
        tensors: of any shapes.
    """
    found = [part for tensor in tensors if tensor.numel() for part in _squares(tensor)]
    if not found:
        return 0.0, 0.0
    squares = torch.cat(found)
    about = float(squares.sum())
    if not math.isfinite(about):
        return about, 0.0
    numbers = squares.tolist() if squares.numel() <= _FEW else _fewer(squares)
    total = math.fsum(numbers)
    return total, math.fsum([*numbers, -total])


def _fewer(values: Tensor) -> list[float]:
    """Return a few numbers whose sum is exactly that of many, which are not negative.

    Upper and lower halves of the digits of all values with the same exponent add up without rounding.
    """
    digits, exponents = torch.frexp(values)  # from 1/2 to 1, of 53 bits
    upper = (digits * 2**27).floor()
    lower = (digits * 2**27 - upper) * 2**26
    lowest = int(exponents.min())
    places = (exponents - lowest).long()
    sums = torch.zeros(2, int(places.max()) + 1, dtype=torch.float64, device=values.device)
    for half, part in zip(sums, (upper, lower), strict=True):
        half.index_add_(0, places, part)
    halves = zip(sums.tolist(), (27, 53), strict=True)
    return [math.ldexp(s, lowest + place - bits) for half, bits in halves for place, s in enumerate(half) if s]


def _squares(tensor: Tensor) -> list[Tensor]:
    """Return the squared norms of the rows of a tensor, of parts of them if they are long, in float64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dim() < 2:
        return [tensor.reshape(-1).double().square()]
    parts = torch.split(tensor.flatten(1), _COLUMNS, dim=1)
    return [torch.linalg.vector_norm(part, dim=1).double().square() for part in parts]
