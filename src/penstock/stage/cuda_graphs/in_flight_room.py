"""The memory of a microbatch in flight, which all recordings that it may use share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from torch.utils import _pytree as pytree

from penstock.stage.cuda_graphs.captured_pass import CapturedPass, FixedMemory, Given
from penstock.weights.memory.buffers import Buffer


class RecordingKey(NamedTuple):
    """What a recording depends on, but for the buffers.

    Attributes:
        spec: the tree of input and target.
        wants: which leaves of the input want gradients.
        tensors: shape, strides and dtype of each leaf; None of one that is None.
        halves: the backward comes in two halves.
    """

    spec: pytree.TreeSpec
    wants: tuple[bool, ...]
    tensors: tuple[object, ...]
    halves: bool

    @classmethod
    def of(cls, given: Given, halves: bool) -> RecordingKey:
        """What recordings of a forward that gets this depend on."""
        leaves, spec = pytree.tree_flatten((given.value, given.target))
        kinds = tuple(None if leaf is None else (leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        return cls(spec, given.wants, kinds, halves)


class Claim:
    """What a microbatch has of a room, until it is dropped."""


class InFlightRoom:
    """Room for one microbatch in flight: its memory, and the recordings that use it.

    Args:
        kept: pool of memory for what is kept from forwards to backwards.

    Attributes:
        kept: the same.
        memories: by what recordings depend on.
        passes: by that, and the buffers of weights and gradient.
    """

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.memories: dict[RecordingKey, FixedMemory] = {}
        self.passes: dict[tuple[RecordingKey, Buffer, Buffer], CapturedPass] = {}
        self._claim: Callable[[], Claim | None] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether no microbatch has it."""
        return self._claim() is None

    def claim(self) -> Claim:
        """Give it to a microbatch."""
        claim = Claim()
        self._claim = ref(claim)
        return claim
