"""A message between two stages: a header, and a tree of tensors and plain values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from penstock.comm.p2p.trees import leaves_of


class Header(NamedTuple):
    """The metadata at the beginning of every message.

    Attributes:
        batch: the batch, counted from the start of training.
        first: the first microbatch, counted from the start of the span.
        more: whether another batch follows this one.
        checksum: of the samples that the data was computed from.
        weight: the loss weight of the whole batch; NaN until the last stage knows it.
        piece: the slice of the sequence.
        stop: of a gradient, where the sender, or a rank before it, asks for an end: 1 more than the batches from this
            one on before it. Of an activation, 1: an evaluation has no data, and the tree is the reason.
        auxiliary: of an activation: the auxiliary losses of the stages so far; of a gradient: that of one such loss,
            before its coefficient. NaN where there are none.
    """

    batch: int
    first: int
    more: bool
    checksum: int = 0
    weight: float = math.nan
    piece: int = 0
    stop: int = 0
    auxiliary: float = math.nan


@dataclass
class TensorMessage:
    """A message between stages: a header and a pytree whose tensors do not require gradients.

    Attributes:
        wants_gradient: per leaf, whether the receiver must send its gradient back.
        on_use: called by the consumer before it uses the data, for example to make its stream wait.
    """

    header: Header
    tree: Any
    wants_gradient: tuple[bool, ...] = ()
    on_use: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        if isinstance(self.tree, Tensor):
            return self.tree.nbytes
        total = 0  # a generator would take longer than the one or two leaves that there are
        for leaf in leaves_of(self.tree):
            if isinstance(leaf, Tensor):
                total += leaf.nbytes
        return total
