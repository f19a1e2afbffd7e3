"""The precision that passes compute in, and the cast of their inputs."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError

PrecisionName = Literal["fp32", "bf16", "fp16"]


def low_precision(precision: PrecisionName) -> torch.dtype | None:
    """Return the dtype that parameters are cast to; None where they stay as they are.

    Raises:
        ConfigError: the precision is unknown.
    """
    if precision not in get_args(PrecisionName):
        raise ConfigError(f"precision must be one of {', '.join(get_args(PrecisionName))}; got {precision!r}")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def cast(value: Any, precision: torch.dtype | None) -> Any:
    """Cast the float32 tensors of a tree; None leaves all as they are."""
    if precision is None:
        return value
    return pytree.tree_map(
        lambda x: x.to(precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, value
    )
