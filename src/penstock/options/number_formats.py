"""The number formats that users choose by name: of passes, and of gradients between stages."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, get_args

import torch

from penstock.errors import ConfigError

PrecisionName = Literal["fp32", "bf16", "fp16"]
NAMES = MappingProxyType({torch.bfloat16: "bf16", torch.float16: "fp16"})
_ELSEWHERE = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "no": "fp32"})
BoundaryGradients = Literal["same", "bf16"]


def low_precision(precision: PrecisionName) -> torch.dtype | None:
    """Return the dtype that parameters are cast to; None where they stay as they are.

    Raises:
        ConfigError: the precision is unknown.
    """
    if precision not in get_args(PrecisionName):
        meant = _ELSEWHERE.get(str(precision).removeprefix("torch."))
        hint = "" if meant is None else f"; write precision={meant!r}"
        known = ", ".join(get_args(PrecisionName))
        raise ConfigError(f"precision must be one of {known}; got {precision!r:.80}{hint}")
    return next((dtype for dtype, name in NAMES.items() if name == precision), None)


def boundary_format(name: BoundaryGradients) -> torch.dtype | None:
    """Return the format that float32 gradients are rounded to between stages; None where they stay as they are.

    Raises:
        ConfigError: the format is unknown.
    """
    if name not in get_args(BoundaryGradients):
        known = ", ".join(get_args(BoundaryGradients))
        raise ConfigError(f"boundary_gradients must be one of {known}; got {name!r:.80}")
    return torch.bfloat16 if name == "bf16" else None
