"""Refuses trained parameters that share memory with another tensor of the model without being one `Parameter`.

In plain torch a step of one changes the other. Here each stage has its weights in memory of its own, and versions of
them, so the two would part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError


def check_shared_memory(blocks: Mapping[str, Any]) -> None:
    """Make sure that no trained parameter of some blocks lies over the memory of another parameter or buffer.

    Args:
        blocks: by name; lazy ones and functions are passed over.

    Raises:
        ConfigError: one does.
    """
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _tensors(blocks):
        tensors.setdefault(id(tensor), (name, tensor))
    spans = sorted((*_span(tensor), number) for number, (_, tensor) in enumerate(tensors.values()) if _lies(tensor))
    names = list(tensors.values())
    for (start, end, mine), (begin, _, other) in pairwise(spans):
        (first, one), (second, two) = (names[number] for number in sorted((mine, other)))
        trained = one.requires_grad or two.requires_grad
        if begin < end and trained and (begin == start or (one.is_contiguous() and two.is_contiguous())):
            raise ConfigError(
                f"{second} and {first} are two tensors over the same memory, but not one Parameter, so their weights "
                f"would part as soon as one is stepped; make them one, as in head.weight = embedding.weight, or give "
                f"{second} memory of its own: nn.Parameter(tensor.clone())"
            )


def _tensors(blocks: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for prefix, block in blocks.items():
        if isinstance(block, nn.Module):
            yield from block.named_parameters(prefix=prefix, remove_duplicate=False)
            yield from block.named_buffers(prefix=prefix, remove_duplicate=False)


def _lies(tensor: Tensor) -> bool:
    """Return whether a tensor has memory that can be compared."""
    return (
        tensor.layout is torch.strided
        and tensor.numel() > 0
        and not nn.parameter.is_lazy(tensor)
        and bool(tensor.data_ptr())
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of that after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
