"""Wire format of messages between stages: header, structure and tensors in one block of bytes.

Layout: a header of 64 bytes; then, if the structure differs from that of the lane's previous message, its description
as JSON; then the tensors, each aligned to 64 bytes, so that a received tensor is a view of the block; then a byte that
is always 1, so that it tells in a block that was 0 there whether all of the message has come.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.comm.p2p.trees import (
    as_it_lies,
    dimensions_by_stride,
    fetch_laid,
    find_classes,
    leaves_of,
    register_classes,
    tree_of,
)
from penstock.errors import CapabilityError, TransportError
from penstock.schedule.ir.schedule import Payload

Structure = tuple[pytree.TreeSpec, list[list[Any]], tuple[bool, ...]]
"""The tree, the kind of each leaf, and whether each leaf requires a gradient."""


# The 64 bytes at the beginning of a message on its way.
#
# They name batch and microbatch, so that a receiver notices a wrong message, and carry what accompanies the data:
# whether another batch follows, when the run is to end, a checksum of the samples, the loss weight of the batch,
# auxiliary losses, and how many RECVs the sender has posted on each of its lanes from the receiver (credits, modulo
# `CREDIT_RANGE`).


def write_header(raw: memoryview, header: Header, described: int, credits: Credits) -> None:
    """Write the header of a whole message.

    Args:
        raw: the memory of the whole message.
        header: what it says of its contents.
        described: bytes of the description of its structure; 0 if that is the one of the message before.
        credits: for every payload, how many RECVs the sender has posted.
    """
    h, flags = header, header.more | header.stop << 1 | header.piece << 9
    facts = h.batch, h.first, h.weight, h.auxiliary, h.checksum
    _HEADER.pack_into(raw, 0, len(raw), *facts, described, flags, False, True, *credits)


def read_header(raw: memoryview) -> tuple[int, int, Header]:
    """Read the size of a message, that of the description of its structure, and what its header says."""
    size, batch, first, weight, auxiliary, checksum, described, flags, *_ = _HEADER.unpack_from(raw)
    more, stop = bool(flags & 1), flags >> 1 & 0xFF
    return size, described, Header(batch, first, more, checksum, weight, flags >> 9, stop, auxiliary)


def split(block: Tensor) -> list[Tensor]:
    """Split a block into its header, which is marked as continued, and the rest."""
    block[_CONTINUED] = 1
    return [block[:HEADER_BYTES], block[HEADER_BYTES:]]


def transport_fields(raw: memoryview) -> tuple[int, bool, Credits]:
    """Read from a header the size of the whole block, whether it continues in another send, and the credits."""
    size, _, _, _, _, _, _, _, continued, _, *credit = _HEADER.unpack_from(raw)
    return size, continued, credit


def expect(raw: memoryview, size: int) -> None:
    """Prepare a block that is to be received, so that `has_come` tells when the message is there.

    Args:
        raw: its memory.
        size: of the message, as far as can be known; 0 if it is unknown.
    """
    raw[_ARRIVED] = 0
    if HEADER_BYTES < size <= len(raw):
        raw[size - 1] = 0


def has_come(raw: memoryview, size: int) -> bool:
    """Return whether a message is in the block that `expect` has prepared for it.

    Of a message of another size than expected only the header is sure to be there: it may still be on its way.
    """
    if not raw[_ARRIVED]:
        return False
    return bool(raw[_CONTINUED] or _SIZE.unpack_from(raw)[0] != size or raw[size - 1])


def bytes_of(block: Tensor) -> memoryview:
    """Return the memory of a block."""
    return block.numpy().data


_ALIGNMENT = 64  # bytes, of every tensor in a block; kernels may round differently on unaligned data

Fetch = Callable[[torch.dtype, list[int]], Tensor]
"""Given a type and a shape, returns the next tensor of a message."""
HEADER_BYTES = 64
_HEADER = struct.Struct("<qqqddIII??5H")
_CONTINUED = 52  # the byte of the header that marks a message whose rest follows as another send
_SIZE = struct.Struct("<q")  # of the whole block, at the beginning of the header
_ARRIVED = 53  # the byte that is always 1, so that it tells in a block that was 0 there whether the header has come
CREDITED = tuple(Payload)  # the lanes that the credits are about
CREDIT_RANGE = 1 << 16  # credits are counted modulo this
NO_CREDITS = (0,) * len(CREDITED)
Credits = Sequence[int]


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


def structure_of(message: TensorMessage, where: str) -> Structure:
    """Describe a message's tree and tensors, without the header and the contents.

    Raises:
        CapabilityError: a leaf is neither a tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten(message.tree)
    kinds: list[list[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            check_dense(leaf, where)
            dtype = str(leaf.dtype).removeprefix("torch.")
            kinds.append(["tensor", dtype, list(leaf.shape), dimensions_by_stride(leaf)])
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kinds.append(["value", leaf, repr(leaf)])  # False == 0 and 0.0 == -0.0, but not as text
        else:
            raise CapabilityError(
                f"{where}: a block returned a {type(leaf).__name__}; between stages only tensors, numbers, strings and "
                "None can travel, in any nesting of dicts, lists, tuples and dataclasses whose fields are all arguments"
            )
    return spec, kinds, message.wants_gradient


def form_of(message: TensorMessage) -> tuple[Any, ...] | None:
    """A key that equals only for messages of the same structure, found without a walk; None where there is none.

    There is one for a tensor, and for a list of tensors and None.
    """
    tree = message.tree
    if isinstance(tree, Tensor):
        return tree.dtype, tree.shape, tree.stride(), message.wants_gradient
    if type(tree) is not list:
        return None
    forms: list[Any] = []
    for leaf in tree:
        if isinstance(leaf, Tensor):
            forms.append((leaf.dtype, leaf.shape, leaf.stride()))
        elif leaf is None:
            forms.append(None)
        else:
            return None
    return (*forms, message.wants_gradient, len(tree))


def check_dense(tensor: Tensor, where: str) -> None:
    """Refuse a tensor that is not one block of memory.

    Raises:
        CapabilityError: it is sparse or nested.
    """
    if tensor.is_nested:
        raise CapabilityError(
            f"{where}: a block returned a nested tensor, but between stages only dense ones can travel; return a "
            "padded tensor and the lengths, or its values() and offsets(), or cut the model elsewhere (partition)"
        )
    if tensor.layout is not torch.strided:
        raise CapabilityError(
            f"{where}: a block returned a sparse tensor ({tensor.layout}), but between stages only dense ones can "
            "travel; return to_dense(), or its indices and values, or cut the model elsewhere (partition)"
        )


def dump_structure(structure: Structure, where: str) -> bytes:
    """Encode a structure as JSON.

    Raises:
        CapabilityError: it cannot be rebuilt from JSON.
    """
    spec, kinds, wants = structure
    try:
        classes = register_classes(spec)
        text = pytree.treespec_dumps(spec)
        if pytree.treespec_loads(text) != spec:
            raise NotImplementedError("keys of dicts must be strings or numbers, not tuples")
    except (NotImplementedError, TypeError, ValueError) as error:
        raise CapabilityError(
            f"{where}: a block returned a structure that cannot travel between stages: {error}; use dicts, lists, "
            "tuples and dataclasses, or register the class with a serialized name in torch.utils._pytree on every rank"
        ) from None
    return json.dumps([text, kinds, [int(w) for w in wants], classes], separators=(",", ":")).encode()


def parse_structure(description: bytes, where: str) -> Structure:
    """Decode what `dump_structure` has encoded.

    Raises:
        TransportError: it is something else, or names a class that this process does not have.
    """
    try:
        spec, kinds, wants, classes = json.loads(description)
        find_classes(classes)
        return pytree.treespec_loads(spec), kinds, tuple(map(bool, wants))
    except (ValueError, NotImplementedError) as error:
        raise TransportError(f"{where}: cannot read the structure of a message: {error}") from None


def described_tensors(description: bytes, where: str) -> list[tuple[torch.dtype, list[int]]]:
    """Return types and shapes, as they lie in memory, of the tensors of a message with a described structure."""
    _, kinds, _ = parse_structure(description, where)
    found = [(getattr(torch, k[1]), k[2], k[3]) for k in kinds if k[0] == "tensor"]
    return [(dtype, shape if order is None else [shape[d] for d in order]) for dtype, shape, order in found]
