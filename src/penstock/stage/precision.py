"""What passes compute in."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]


def low_precision(precision: Precision) -> torch.dtype | None:
    """The type that parameters are cast to; None where they stay as they are.

    Raises:
        ConfigError: unknown precision.
    """
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be one of {', '.join(get_args(Precision))}; got {precision!r}")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def cast(value: Any, precision: torch.dtype | None) -> Any:
    """A tree whose tensors in float32 are cast."""
    if precision is None:
        return value
    return pytree.tree_map(
        lambda x: x.to(precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, value
    )
