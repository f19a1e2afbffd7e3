"""Scratch memory to which gradients move while new weights are written over them, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.weights.memory.buffers import Layout

_CHUNK = 1 << 20  # least number of elements: each call of an optimizer costs 0.3 ms, however few it steps


class Scratch:
    """The scratch memory of one stage.

    Args:
        layout: the layout of its parameters.
        separable: True if the optimizer may step some of them at a time; otherwise they are one group.

    Attributes:
        groups: per group of parameters that are stepped together, the places of their gradients; all groups share the
            same memory.
        nbytes: its size in bytes.
    """

    def __init__(self, layout: Layout, separable: bool) -> None:
        chunks = step_groups(layout, separable)
        memory = _memory(layout, chunks)
        self.groups = [_places(layout, chunk, memory) for chunk in chunks]
        self.nbytes = sum(tensor.nbytes for tensor in memory.values())


def step_groups(layout: Layout, separable: bool) -> list[list[str]]:
    """Return groups of parameters that are stepped together; one if they are not separable."""
    return list(_chunks(layout, separable))


def _chunks(layout: Layout, separable: bool) -> Iterator[list[str]]:
    """Yield groups of parameters that are stepped together, no larger than the largest parameter or `_CHUNK`."""
    if not separable:
        yield list(layout.slots)
        return
    limit = max([_CHUNK, *(slot.padded for slot in layout.slots.values())])
    chunk: list[str] = []
    size = 0
    for name, slot in layout.slots.items():
        if chunk and size + slot.padded > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += slot.padded
    if chunk:
        yield chunk


def _memory(layout: Layout, chunks: list[list[str]]) -> dict[torch.dtype, Tensor]:
    sizes = dict.fromkeys(layout.sizes, 0)
    for chunk in chunks:
        for dtype in sizes:
            here = (slot.padded for slot in map(layout.slots.__getitem__, chunk) if slot.dtype == dtype)
            sizes[dtype] = max(sizes[dtype], sum(here))
    return {dtype: torch.empty(size, dtype=dtype, device=layout.device) for dtype, size in sizes.items()}


def _places(layout: Layout, chunk: list[str], memory: dict[torch.dtype, Tensor]) -> dict[str, Tensor]:
    """Return the places in the scratch of the gradients of a group."""
    places, used = {}, dict.fromkeys(memory, 0)
    for name in chunk:
        slot = layout.slots[name]
        start = used[slot.dtype]
        used[slot.dtype] = start + slot.padded
        places[name] = memory[slot.dtype][start : start + slot.numel].view(slot.shape)
    return places
