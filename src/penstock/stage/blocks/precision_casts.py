"""Casts to the precision that passes compute in, and what to say where formats do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import CapabilityError, ConfigError
from penstock.options.passes import NAMES, Precision


def cast(value: Any, precision: torch.dtype | None) -> Any:
    """Cast the float32 tensors of a tree; None leaves all as they are."""
    if precision is None:
        return value
    return pytree.tree_map(
        lambda x: x.to(precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, value
    )


def in_full(value: Any, precision: torch.dtype | None) -> Any:
    """Cast the tensors of a tree that are of a lower precision to float32, as autocast does before losses.

    A mean over many classes or tokens has three digits in bfloat16; so have the gradients that begin with it.
    """
    if precision is None:
        return value
    return pytree.tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == precision else x, value)


def check_formats(error: RuntimeError, where: str, value: Any, precision: torch.dtype | None) -> None:
    """Explain what a block has raised, if it was given float32 where its weights are of a lower precision.

    Args:
        error: what it has raised.
        where: the block.
        value: what it was given.
        precision: of its weights; None for their own.

    Raises:
        CapabilityError: that is the reason.
    """
    said = str(error)
    mixed = any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in pytree.tree_leaves(value))
    if precision is None or not mixed or not ("dtype" in said or "scalar type" in said):
        return
    low = str(precision).removeprefix("torch.")
    raise CapabilityError(
        f"{where}: the block before it returned float32, but with precision={NAMES[precision]!r} its weights are "
        f"{low}, and torch does not compute with both ({said}). Only the inputs of the model are cast, not at every "
        "operation as under torch.autocast: let the block before end with .to(x.dtype), x being its input, or let this "
        f"one begin with .to(torch.{low})"
    ) from error


def check_casts(parameters: Mapping[str, Tensor], precision: Precision, where: str) -> None:
    """Make sure that a lower precision has something to act on, where there are parameters.

    Args:
        parameters: all of a stage, by name.
        precision: of its passes.
        where: the stage in messages.

    Raises:
        ConfigError: all are float64, which stay as they are.
    """
    wanted = "precision" if precision.low is not None else "boundary_gradients" if precision.between_stages else None
    if wanted is None or not parameters or {each.dtype for each in parameters.values()} != {torch.float64}:
        return
    raise ConfigError(
        f"{where}: {wanted}={getattr(precision, wanted)!r} is for float32, but all {len(parameters)} parameters here "
        f"are float64 ({', '.join(list(parameters)[:3])}{', ...' * (len(parameters) > 3)}), which is never cast: make "
        f"the model float32 (model.float(), and its inputs), or leave {wanted} out"
    )
