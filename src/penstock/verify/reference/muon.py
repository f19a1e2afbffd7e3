"""Muon's direction ("Muon: An optimizer for hidden layers in neural networks", Jordan et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def muon_direction(buffer: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return what an update with a rate of 1 subtracts from a matrix whose momentum so far is `buffer`.

    Five times (or `ns_steps`) X <- a X + (b A + c A A) X with A = X X^T, from X = M / |M|, on the side on which A is
    small: about U V^T where M = U S V^T. Groups of torch's Muon iterate in bfloat16; others have a precision,
    `ns_dtype`, or None, which means float32 on CPUs. The result is multiplied by torch's adjustment of the rate: for a
    matrix with p rows and q columns sqrt(max(1, p/q)), or 0.2 sqrt(max(p, q)) with "match_rms_adamw".

    A step with Nesterov's momentum uses (1 - momentum) g + momentum M instead of M. As the next g is not known, M is
    used, as for SGD. Weight decay is not part of it.

    Args:
        buffer: the momentum, of two dimensions.
        group: the parameter group: ns_coefficients, ns_steps, eps, adjust_lr_fn and perhaps ns_dtype.

    Returns:
        The direction, in the precision of the buffer.
    """
    rows, columns = buffer.shape
    wide = (buffer.T if rows > columns else buffer).to(_precision(buffer, group))
    a, b, c = group["ns_coefficients"]
    x = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    direction: Tensor = (x.T if rows > columns else x).to(buffer.dtype)
    return _adjustment(rows, columns, group["adjust_lr_fn"]) * direction


def _precision(buffer: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    if "ns_dtype" not in group:
        return torch.bfloat16
    if group["ns_dtype"] is None:
        return torch.float32 if buffer.device == torch.device("cpu") else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[group["ns_dtype"]]


def _adjustment(rows: int, columns: int, how: str | None) -> float:
    if how == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
