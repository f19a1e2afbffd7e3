"""The precision that passes compute in, the cast of their inputs, and the format of gradients between stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from penstock.errors import ConfigError

PrecisionName = Literal["fp32", "bf16", "fp16"]
BoundaryGradients = Literal["same", "bf16"]


def low_precision(precision: PrecisionName) -> torch.dtype | None:
    """Return the dtype that parameters are cast to; None where they stay as they are.

    Raises:
        ConfigError: the precision is unknown.
    """
    if precision not in get_args(PrecisionName):
        raise ConfigError(f"precision must be one of {', '.join(get_args(PrecisionName))}; got {precision!r}")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def boundary_format(name: BoundaryGradients) -> torch.dtype | None:
    """Return the format that float32 gradients are rounded to between stages; None where they stay as they are.

    Raises:
        ConfigError: the format is unknown.
    """
    if name not in get_args(BoundaryGradients):
        known = ", ".join(get_args(BoundaryGradients))
        raise ConfigError(f"boundary_gradients must be one of {known}; got {name!r:.80}")
    return torch.bfloat16 if name == "bf16" else None


def kept_full(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module that are not cast to a lower precision.

    They are those of layers with running statistics, such as BatchNorm: the statistics stay in float32, and torch
    computes on inputs of lower precision with parameters of the same format as the statistics.
    """
    for inner in module.modules():
        if isinstance(inner, _NormBase) and inner.running_mean is not None:
            yield from inner.parameters(recurse=False)


def cast(value: Any, precision: torch.dtype | None) -> Any:
    """Cast the float32 tensors of a tree; None leaves all as they are."""
    if precision is None:
        return value
    return pytree.tree_map(
        lambda x: x.to(precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, value
    )
