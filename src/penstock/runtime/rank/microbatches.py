"""From what a loader yields to the microbatches of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import DataError

Microbatches = Sequence[tuple[Any, Any]]


def microbatches_of(batch: Any, count: int, number: int) -> Microbatches:
    """Return the microbatches of a batch: as they are given, or a whole batch split along the first dimension.

    A tuple or list of two things that are not both pairs is a whole batch (inputs, targets), as a DataLoader yields it.
    Its parts differ by one sample at most, the larger ones first; what is no tensor goes to every microbatch.

    Args:
        batch: as the loader yields it.
        count: of microbatches.
        number: of the batch in the span, for messages.

    Raises:
        DataError: the batch is neither, or has too few samples, or tensors of several lengths.
    """
    if not isinstance(batch, Sequence):
        raise DataError(
            f"batch {number} is a {type(batch).__name__}; a batch is a pair (inputs, targets) of tensors, as a "
            f"DataLoader yields it, or a list of {count} microbatches, each a pair (input, target)"
        )
    whole = isinstance(batch, tuple | list) and len(batch) == 2 and not all(map(_is_pair, batch))
    return _split(batch, count, number) if whole else batch


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _split(batch: Sequence[Any], count: int, number: int) -> Microbatches:
    leaves, spec = pytree.tree_flatten(tuple(batch))
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    samples = {shape[0] for shape in shapes}
    if len(samples) > 1:
        raise DataError(
            f"batch {number} cannot be split into {count} microbatches: its tensors have shapes "
            f"{', '.join(map(str, shapes))}, so not as many samples each; give all of them one first dimension, or the "
            "microbatches themselves, as a list of pairs"
        )
    if not samples or min(samples) < count:
        raise DataError(
            f"batch {number} has {min(samples, default=0)} samples, too few for {count} microbatches; use larger "
            "batches, and drop_last=True in the DataLoader where the last batch is short"
        )
    parts = [
        torch.tensor_split(leaf, count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[k] for part in parts], spec) for k in range(count)]
