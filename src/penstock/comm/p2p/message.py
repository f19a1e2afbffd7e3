"""What travels between ranks: any pytree of tensors and plain values, with a header, as one block of bytes.

Layout: 64 bytes of header; if the structure differs from the lane's previous parcel, its description as JSON; then the
tensors, each aligned to 64 bytes, so that a received tensor is a view of the block. Every header names batch and
microbatch, so that nobody can mistake one message for another, and carries what travels along with data: whether
another batch follows, a checksum of the samples, and the loss weight of the batch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import TransportError
from penstock.weights.memory.buffers import ALIGNMENT

HEADER_BYTES = 64
_CONTINUED = 48  # the byte of the header that says that the rest comes as another message
_HEADER = struct.Struct("<qqqqqqqd")
Structure = tuple[pytree.TreeSpec, list[list[Any]], tuple[bool, ...]]
"""The tree, what each leaf is, and which leaves want a gradient."""


class Header(NamedTuple):
    """What accompanies every message.

    Attributes:
        batch: the batch, counted from the start of training.
        first: the first microbatch, counted from the start of the span.
        more: whether another batch follows this one.
        checksum: of the samples, from the first stage to the last.
        weight: the loss weight of the whole batch, once the last stage knows it; NaN before.
        piece: the slice of the sequence.
    """

    batch: int
    first: int
    more: bool
    checksum: int = 0
    weight: float = math.nan
    piece: int = 0


@dataclass
class Parcel:
    """A header and a pytree whose tensors do not require gradients.

    Attributes:
        wants_gradient: per leaf, whether the sender will ask for its gradient.
        on_use: what the consumer must do first, such as make its stream wait for the data.
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
        return sum(leaf.nbytes for leaf in leaves_of(self.tree) if isinstance(leaf, Tensor))


class Codec:
    """Turns parcels of one lane into blocks of bytes and back; both ends see the same sequence of parcels.

    Args:
        where: the lane, for messages.
        inline: tensors travel in the block; otherwise it only describes them and they travel on another way.
    """

    def __init__(self, where: str, inline: bool = True) -> None:
        self.where, self._inline = where, inline
        self._sent: Structure | None = None
        self._form: tuple[Any, ...] | None = None
        self._received: Structure | None = None

    def encode(self, parcel: Parcel) -> Tensor:
        """The parcel as one block (uint8, one dimension, at least `HEADER_BYTES` long)."""
        leaves = leaves_of(parcel.tree) if self._inline else []
        tensors = [as_it_lies(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        changed = self._change(parcel)
        offsets, size = _place(tensors, HEADER_BYTES + len(changed))
        block = torch.empty(size, dtype=torch.uint8)
        raw = bytes_of(block)  # written into at a fraction of what operations on tensors take
        h = parcel.header
        flags = int(h.more) | h.piece << 1
        _HEADER.pack_into(raw, 0, size, len(changed), h.batch, h.first, flags, h.checksum, 0, h.weight)
        raw[HEADER_BYTES : HEADER_BYTES + len(changed)] = changed
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.numel():
                target = block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor)
        return block

    def _change(self, parcel: Parcel) -> bytes:
        """The description of a parcel's structure, or nothing where it is that of the parcel before."""
        form = form_of(parcel)
        if form is not None and form == self._form:
            return b""
        self._form, structure = form, structure_of(parcel, self.where)
        changed = b"" if structure == self._sent else dump_structure(structure, self.where)
        self._sent = structure
        return changed

    def decode(self, block: Tensor, fetch: Callable[[torch.dtype, list[int]], Tensor] | None = None) -> Parcel:
        """The parcel in a block.

        Args:
            block: as `encode` made it.
            fetch: gets the next tensor, where tensors are not inline; else they are views of the block.
        """
        raw = bytes_of(block)
        size, meta_bytes, batch, first, flags, checksum, _, weight = _HEADER.unpack_from(raw)
        if meta_bytes:
            self._received = _parse(bytes(raw[HEADER_BYTES : HEADER_BYTES + meta_bytes]), self.where)
        if self._received is None:
            raise TransportError(f"{self.where}: a message came before any description of its structure")
        spec, kinds, wants = self._received
        fetch = fetch or _views(block, HEADER_BYTES + meta_bytes, size, self.where)
        leaves = [
            _laid(kind[2:], partial(fetch, getattr(torch, kind[1]))) if kind[0] == "tensor" else kind[1]
            for kind in kinds
        ]
        header = Header(batch, first, bool(flags & 1), checksum, weight, flags >> 1)
        return Parcel(header, pytree.tree_unflatten(leaves, spec), wants)


def as_it_lies(tensor: Tensor) -> Tensor:
    """The same elements in the sequence in which they lie in memory."""
    order = _dimensions(tensor)
    return tensor if order is None else tensor.permute(order)


def copied(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as a received tensor would: kernels may round differently where strides differ."""
    order = _dimensions(tensor)
    if order is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    return _laid([list(tensor.shape), order], lambda _: as_it_lies(tensor).clone(memory_format=torch.contiguous_format))


def _dimensions(tensor: Tensor) -> list[int] | None:
    """Its dimensions from the longest stride to the shortest; None where that is their own sequence, or leaves gaps."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _laid(form: list[Any], fetch: Callable[[list[int]], Tensor]) -> Tensor:
    """A tensor of a shape, with its dimensions in a sequence of their own."""
    shape, order = form
    if order is None:
        return fetch(shape)
    places = sorted(range(len(order)), key=order.__getitem__)
    return fetch([shape[d] for d in order]).permute(places)


def structure_of(parcel: Parcel, where: str) -> Structure:
    """Everything about a parcel but its header and the contents of its tensors.

    Raises:
        TransportError: a leaf is neither a tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten(parcel.tree)
    kinds: list[list[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append(["tensor", str(leaf.dtype).removeprefix("torch."), list(leaf.shape), _dimensions(leaf)])
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kinds.append(["value", leaf, repr(leaf)])  # False == 0 and 0.0 == -0.0, but not as text
        else:
            raise TransportError(
                f"{where}: a block returned a {type(leaf).__name__}; between stages only tensors, numbers, strings and "
                "None can travel, in any nesting of dicts, lists and tuples"
            )
    return spec, kinds, parcel.wants_gradient


def form_of(parcel: Parcel) -> tuple[Any, ...] | None:
    """A key that equals only for parcels of the same structure, found without a walk; None where there is none.

    There is one for a tensor, and for a list of tensors and None.
    """
    tree = parcel.tree
    if isinstance(tree, Tensor):
        return tree.dtype, tree.shape, tree.stride(), parcel.wants_gradient
    if type(tree) is list and all(leaf is None or isinstance(leaf, Tensor) for leaf in tree):
        forms = [None if leaf is None else (leaf.dtype, leaf.shape, leaf.stride()) for leaf in tree]
        return (*forms, parcel.wants_gradient, len(tree))
    return None


def dump_structure(structure: Structure, where: str) -> bytes:
    """A structure as JSON.

    Raises:
        TransportError: the receiver could not make the same tree of it.
    """
    spec, kinds, wants = structure
    try:
        text = pytree.treespec_dumps(spec)
        if pytree.treespec_loads(text) != spec:
            raise NotImplementedError("keys of dicts must be strings or numbers, not tuples")
    except (NotImplementedError, TypeError, ValueError) as error:
        raise TransportError(
            f"{where}: a block returned a structure that cannot travel between stages: {error}; use dicts, lists and "
            "tuples, or register the class with a serialized name in torch.utils._pytree on every rank"
        ) from None
    return json.dumps([text, kinds, [int(w) for w in wants]], separators=(",", ":")).encode()


def _views(block: Tensor, offset: int, size: int, where: str) -> Callable[[torch.dtype, list[int]], Tensor]:
    """Gets the tensors of a block, one after the other."""

    def fetch(dtype: torch.dtype, shape: list[int]) -> Tensor:
        nonlocal offset
        start = _aligned(offset)
        offset = start + math.prod(shape) * dtype.itemsize
        if offset > size:
            raise TransportError(f"{where}: a message of {size} bytes is too short for its tensors ({offset})")
        return block[start:offset].view(dtype).view(shape) if offset > start else torch.empty(shape, dtype=dtype)

    return fetch


def split(block: Tensor) -> list[Tensor]:
    """A block in two: its header, marked as continued, and the rest."""
    block[_CONTINUED] = 1
    return [block[:HEADER_BYTES], block[HEADER_BYTES:]]


def size_and_continued(head: Tensor) -> tuple[int, bool]:
    """The size of a block, and whether only its header is here, from its first `HEADER_BYTES` bytes."""
    size, *_, continued, _ = _HEADER.unpack_from(bytes_of(head))
    return size, bool(continued)


def bytes_of(block: Tensor) -> memoryview:
    """The memory of a block."""
    return block.numpy().data


def _parse(meta: bytes, where: str) -> Structure:
    try:
        spec, kinds, wants = json.loads(meta)
        return pytree.treespec_loads(spec), kinds, tuple(map(bool, wants))
    except (ValueError, NotImplementedError) as error:
        raise TransportError(f"{where}: cannot read the structure of a message: {error}") from None


def _place(tensors: list[Tensor], start: int) -> tuple[list[int], int]:
    offsets = []
    for tensor in tensors:
        start = _aligned(start)
        offsets.append(start)
        start += tensor.nbytes
    return offsets, start


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a pytree; without a walk where it is a tensor, or a list of tensors and None."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is list and all(leaf is None or isinstance(leaf, Tensor) for leaf in tree):
        return tree
    return pytree.tree_leaves(tree)


def detached(tree: Any) -> tuple[Any, tuple[bool, ...]]:
    """Detach the tensors of a pytree from their graph; also return which of its leaves want a gradient."""
    if isinstance(tree, Tensor):
        return tree.detach(), (tree.requires_grad,)
    leaves, spec = pytree.tree_flatten(tree)
    wants = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(plain, spec), wants
