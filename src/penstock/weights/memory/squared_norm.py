"""The squared norm of gradients, whose bits do not depend on how stages and rows are divided among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

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
    squares = torch.cat(found).tolist()
    total = math.fsum(squares)
    return total, math.fsum([*squares, -total]) if math.isfinite(total) else 0.0


def _squares(tensor: Tensor) -> list[Tensor]:
    """Return the squared norms of the rows of a tensor, of parts of them if they are long, in float64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dim() < 2:
        return [tensor.reshape(-1).double().square()]
    parts = torch.split(tensor.flatten(1), _COLUMNS, dim=1)
    return [torch.linalg.vector_norm(part, dim=1).double().square() for part in parts]
