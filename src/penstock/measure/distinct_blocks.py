"""Which blocks of a model are alike, so that one of them is measured for all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.measure.stage_trial import BlockInput, BlockPlace
from penstock.partition.blocks import LazyBlock
from penstock.stage.autograd.saved_bytes import signature

_PLAIN = (bool, int, float, str, type(None), tuple, torch.Size, torch.dtype)


def kind_of(block: Any, place: BlockPlace, inputs: Mapping[int, BlockInput]) -> Hashable:
    """Return what is the same for two blocks that take the same time and memory.

    Blocks are alike if they stand in the same place, get inputs of the same shapes, and are built by the same function
    with the same arguments or are modules of the same classes with the same plain attributes and the same shapes.
    Functions are alike only themselves.

    Args:
        block: as in a model; a lazy one is built without memory.
        place: where it stands.
        inputs: by microbatch size.
    """
    given = tuple((size, signature(each.value), each.wants) for size, each in inputs.items())
    return place, given, _described(block)


def title_of(block: Any) -> str:
    """Return what a block is, in a word: the name of its class or function."""
    if isinstance(block, LazyBlock):
        with torch.device("meta"):
            block = block.build()
    named = type(block) if isinstance(block, nn.Module) else block
    return str(getattr(named, "__name__", type(block).__name__))


def _described(block: Any) -> Hashable:
    """Return what tells blocks apart."""
    if isinstance(block, LazyBlock):
        build = block.build
        if isinstance(build, partial):
            key = build.func, build.args, tuple(sorted(build.keywords.items()))
            try:
                hash(key)
            except TypeError:
                pass
            else:
                return key
        with torch.device("meta"):
            block = build()
    if not isinstance(block, nn.Module):
        return id(block)
    return tuple((name, type(part), _plain(part), _shapes(part)) for name, part in block.named_modules())


def _plain(module: nn.Module) -> Hashable:
    """Return the attributes of a module that are plain values, such as a number of heads."""
    found: Iterable[tuple[str, Any]] = vars(module).items()
    return tuple((key, v) for key, v in found if not key.startswith("_") and isinstance(v, _PLAIN) and _hashes(v))


def _hashes(value: Any) -> bool:
    """Return whether a value can be compared by its hash."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _shapes(module: nn.Module) -> Hashable:
    """Return the shapes of a module's own parameters and buffers."""
    own: list[tuple[str, Tensor]] = [
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ]
    return tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in own)
