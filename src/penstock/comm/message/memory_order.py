"""The order of a tensor's dimensions in its memory, which a message keeps: kernels may round differently by strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def dimensions_by_stride(tensor: Tensor) -> list[int] | None:
    """The dimensions by decreasing stride; None if they are so already, or if the tensor has gaps."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor whose dimensions are in the order of its memory."""
    order = dimensions_by_stride(tensor)
    return tensor if order is None else tensor.permute(order)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor into the layout that it would have after transport: kernels may round differently by strides."""
    order = dimensions_by_stride(tensor)
    if order is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    dense = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return fetch_laid([list(tensor.shape), order], lambda _: dense)


def fetch_laid(form: list[Any], fetch: Callable[[list[int]], Tensor]) -> Tensor:
    """Fetch a tensor whose memory has its dimensions in another order.

    Args:
        form: its shape, and the order of its dimensions in memory (None: as they are).
        fetch: given the shape as it lies in memory, returns the tensor.
    """
    shape, order = form
    if order is None:
        return fetch(shape)
    places = sorted(range(len(order)), key=order.__getitem__)
    return fetch([shape[d] for d in order]).permute(places)
