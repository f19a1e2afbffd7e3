"""Wire format of messages between stages: header, structure and tensors in one block of bytes.

Layout: a header of 64 bytes; then, if the structure differs from that of the lane's previous message, its description
as JSON; then the tensors, each aligned to 64 bytes, so that a received tensor is a view of the block; then a byte that
is always 1, so that it tells in a block that was 0 there whether all of the message has come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.comm.message.memory_order import as_it_lies, fetch_laid
from penstock.comm.message.structure import Structure, dump_structure, form_of, parse_structure, structure_of
from penstock.comm.message.tensor_message import TensorMessage
from penstock.comm.message.trees import leaves_of, tree_of
from penstock.comm.message.wire_header import (
    HEADER_BYTES,
    NO_CREDITS,
    Credits,
    bytes_of,
    read_header,
    write_header,
)
from penstock.errors import TransportError

_ALIGNMENT = 64  # bytes, of every tensor in a block; kernels may round differently on unaligned data

Fetch = Callable[[torch.dtype, list[int]], Tensor]
"""Given a type and a shape, returns the next tensor of a message."""


class Frame(NamedTuple):
    """A block of bytes with room for the messages of one layout.

    Attributes:
        block: as a tensor (uint8, one dimension, longer than `HEADER_BYTES`).
        raw: the same memory; writing to it costs a fraction of operations on tensors.
        targets: views of it, to which the tensors of a message are copied.
        free: where it is put when it may be written again.
    """

    block: Tensor
    raw: memoryview
    targets: list[Tensor]
    free: list[Frame]


class Codec:
    """Encodes the messages of one lane as blocks of bytes, and decodes them.

    Both ends must see the same sequence of messages, as a structure is sent only when it changes.

    Args:
        where: the lane, for error messages.
        separate: given the description of a message's structure, says whether its tensors are sent separately;
            without it they are always part of the block.

    Attributes:
        read: the description of the last message that was decoded.
    """

    def __init__(self, where: str, separate: Callable[[bytes], bool] | None = None) -> None:
        self.where, self._separate = where, separate
        self._described, self.read = b"", b""
        self._sent: Structure | None = None
        self._form: tuple[Any, ...] | None = None
        self._received: Structure | None = None
        self._layout: object = None  # of the frames that are free
        self._free: list[Frame] = []

    def encode(self, message: TensorMessage, credit: Credits = NO_CREDITS) -> Tensor:
        """The message as one block (uint8, one dimension, longer than `HEADER_BYTES`)."""
        return self.fill(message, credit).block

    def fill(self, message: TensorMessage, credit: Credits = NO_CREDITS) -> Frame:
        """The message in a frame, which may be put back into its `free` once the message has been sent."""
        changed = self._change(message)
        self._described = changed or self._described
        apart = self._separate is not None and self._separate(self._described)
        leaves = [] if apart else leaves_of(message.tree)
        tensors = [as_it_lies(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        if changed or self._layout is not apart:
            self._layout, self._free = None if changed else apart, []
        frame = self._free.pop() if self._free else _make_frame(tensors, len(changed), self._free)
        write_header(frame.raw, message.header, len(changed), credit)
        if changed:
            frame.raw[HEADER_BYTES : HEADER_BYTES + len(changed)] = changed
        for tensor, target in zip(tensors, frame.targets, strict=True):
            target.copy_(tensor)
        return frame

    def _change(self, message: TensorMessage) -> bytes:
        """The description of a message's structure, or nothing where it is that of the message before."""
        form = form_of(message)
        if form is not None and form == self._form:
            return b""
        self._form, structure = form, structure_of(message, self.where)
        changed = b"" if structure == self._sent else dump_structure(structure, self.where)
        self._sent = structure
        return changed

    def decode(
        self, block: Tensor, raw: memoryview | None = None, fetcher: Callable[[bytes], Fetch | None] | None = None
    ) -> TensorMessage:
        """The message in a block.

        Args:
            block: made by `encode`.
            raw: its memory, where that is at hand.
            fetcher: given the description of a message's structure, returns what fetches its tensors; None where
                they are part of the block.
        """
        raw = bytes_of(block) if raw is None else raw
        size, described, header = read_header(raw)
        if described:
            self.read = bytes(raw[HEADER_BYTES : HEADER_BYTES + described])
            self._received = parse_structure(self.read, self.where)
        if self._received is None:
            raise TransportError(f"{self.where}: a message came before any description of its structure")
        spec, kinds, wants = self._received
        fetch = (fetcher and fetcher(self.read)) or _views(block, HEADER_BYTES + described, size, self.where)
        leaves = [
            fetch_laid(kind[2:], partial(fetch, getattr(torch, kind[1]))) if kind[0] == "tensor" else kind[1]
            for kind in kinds
        ]
        return TensorMessage(header, tree_of(leaves, spec), wants)


def _views(block: Tensor, offset: int, size: int, where: str) -> Callable[[torch.dtype, list[int]], Tensor]:
    """Return a function that returns the tensors of a block one after the other, as views."""

    def fetch(dtype: torch.dtype, shape: list[int]) -> Tensor:
        nonlocal offset
        start = _aligned(offset)
        offset = start + math.prod(shape) * dtype.itemsize
        if offset >= size:
            raise TransportError(f"{where}: a message of {size} bytes is too short for its tensors ({offset})")
        return block[start:offset].view(dtype).view(shape) if offset > start else torch.empty(shape, dtype=dtype)

    return fetch


def _make_frame(tensors: list[Tensor], described: int, free: list[Frame]) -> Frame:
    """Make room for tensors like these, behind a description of so many bytes."""
    offsets, end = [], HEADER_BYTES + described
    for tensor in tensors:
        offsets.append(_aligned(end))
        end = offsets[-1] + tensor.nbytes
    block = torch.empty(end + 1, dtype=torch.uint8)
    raw = bytes_of(block)
    raw[end] = 1
    targets = [
        block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if tensor.numel()
        else torch.empty_like(tensor)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    return Frame(block, raw, targets, free)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
