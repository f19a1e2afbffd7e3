"""Wire format of messages between stages: a header and a pytree of tensors and plain values, in one block of bytes.

Layout: a header of 64 bytes; then, if the structure differs from that of the lane's previous message, its description
as JSON; then the tensors, each aligned to 64 bytes, so that a received tensor is a view of the block; then a byte that
is always 1, so that it tells in a block that was 0 there whether all of the message has come. The header names batch
and microbatch, so that a receiver notices a wrong message, and carries what accompanies the data: whether another batch
follows, whether the run is to end, a checksum of the samples, the loss weight of the batch, and how many RECVs
the sender has posted on each of its lanes from the receiver (credits, modulo `CREDIT_RANGE`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.p2p.tree_classes import find_classes, register_classes
from penstock.errors import TransportError
from penstock.schedule.ir.schedule import Payload

HEADER_BYTES = 64
_ALIGNMENT = 64  # bytes, of every tensor in a block; kernels may round differently on unaligned data
_HEADER = struct.Struct("<qqqqdII??5H")
_CONTINUED = 48  # the byte of the header that marks a message whose rest follows as another send
_SIZE = struct.Struct("<q")  # of the whole block, at the beginning of the header
_ARRIVED = 49  # the byte that is always 1, so that it tells in a block that was 0 there whether the header has come
CREDITED = tuple(Payload)  # the lanes that the credits are about
CREDIT_RANGE = 1 << 16  # credits are counted modulo this
NO_CREDITS = (0,) * len(CREDITED)
Credits = Sequence[int]
Structure = tuple[pytree.TreeSpec, list[list[Any]], tuple[bool, ...]]
"""The tree, the kind of each leaf, and whether each leaf requires a gradient."""


Fetch = Callable[[torch.dtype, list[int]], Tensor]
"""Given a type and a shape, returns the next tensor of a message."""


class Header(NamedTuple):
    """The metadata at the beginning of every message.

    Attributes:
        batch: the batch, counted from the start of training.
        first: the first microbatch, counted from the start of the span.
        more: whether another batch follows this one.
        checksum: of the samples that the data was computed from.
        weight: the loss weight of the whole batch; NaN until the last stage knows it.
        piece: the slice of the sequence.
        stop: of a gradient: the sender, or a rank before it, asks for the end of the run. Of an activation: an
            evaluation has no data, and the tree is the reason.
    """

    batch: int
    first: int
    more: bool
    checksum: int = 0
    weight: float = math.nan
    piece: int = 0
    stop: bool = False


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
        raw, h = frame.raw, message.header
        flags = h.more | h.stop << 1 | h.piece << 2
        _HEADER.pack_into(
            raw, 0, len(raw), h.batch, h.first, h.checksum, h.weight, len(changed), flags, False, True, *credit
        )
        if changed:
            raw[HEADER_BYTES : HEADER_BYTES + len(changed)] = changed
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
        size, batch, first, checksum, weight, meta_bytes, flags, *_ = _HEADER.unpack_from(raw)
        if meta_bytes:
            self.read = bytes(raw[HEADER_BYTES : HEADER_BYTES + meta_bytes])
            self._received = _parse(self.read, self.where)
        if self._received is None:
            raise TransportError(f"{self.where}: a message came before any description of its structure")
        spec, kinds, wants = self._received
        fetch = (fetcher and fetcher(self.read)) or _views(block, HEADER_BYTES + meta_bytes, size, self.where)
        leaves = [
            _laid(kind[2:], partial(fetch, getattr(torch, kind[1]))) if kind[0] == "tensor" else kind[1]
            for kind in kinds
        ]
        header = Header(batch, first, bool(flags & 1), checksum, weight, flags >> 2, bool(flags & 2))
        return TensorMessage(header, _tree_of(leaves, spec), wants)


def _tree_of(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Make a tree of its leaves; without torch's walk, which is slow, where it is one leaf or a list of leaves."""
    if spec.num_nodes == len(leaves) == 1:
        return leaves[0]
    flat = spec.type is list and spec.num_nodes == len(leaves) + 1
    return leaves if flat else pytree.tree_unflatten(leaves, spec)


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor whose dimensions are in the order of its memory."""
    order = _dimensions(tensor)
    return tensor if order is None else tensor.permute(order)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor into the layout that it would have after transport: kernels may round differently by strides."""
    order = None if tensor.is_contiguous() else _dimensions(tensor)
    if order is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    return _laid([list(tensor.shape), order], lambda _: as_it_lies(tensor).clone(memory_format=torch.contiguous_format))


def _dimensions(tensor: Tensor) -> list[int] | None:
    """The dimensions by decreasing stride; None if they are so already, or if the tensor has gaps."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _laid(form: list[Any], fetch: Callable[[list[int]], Tensor]) -> Tensor:
    """Fetch a tensor of a shape whose memory has its dimensions in another order."""
    shape, order = form
    if order is None:
        return fetch(shape)
    places = sorted(range(len(order)), key=order.__getitem__)
    return fetch([shape[d] for d in order]).permute(places)


def structure_of(message: TensorMessage, where: str) -> Structure:
    """Describe a message's tree and tensors, without the header and the contents.

    Raises:
        TransportError: a leaf is neither a tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten(message.tree)
    kinds: list[list[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            check_dense(leaf, where)
            kinds.append(["tensor", str(leaf.dtype).removeprefix("torch."), list(leaf.shape), _dimensions(leaf)])
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kinds.append(["value", leaf, repr(leaf)])  # False == 0 and 0.0 == -0.0, but not as text
        else:
            raise TransportError(
                f"{where}: a block returned a {type(leaf).__name__}; between stages only tensors, numbers, strings and "
                "None can travel, in any nesting of dicts, lists, tuples and dataclasses whose fields are all arguments"
            )
    return spec, kinds, message.wants_gradient


def check_dense(tensor: Tensor, where: str) -> None:
    """Refuse a tensor that is not one block of memory.

    Raises:
        TransportError: it is sparse or nested.
    """
    if tensor.is_nested:
        raise TransportError(
            f"{where}: a block returned a nested tensor, but between stages only dense ones can travel; return a "
            "padded tensor and the lengths, or its values() and offsets(), or cut the model elsewhere (partition)"
        )
    if tensor.layout is not torch.strided:
        raise TransportError(
            f"{where}: a block returned a sparse tensor ({tensor.layout}), but between stages only dense ones can "
            "travel; return to_dense(), or its indices and values, or cut the model elsewhere (partition)"
        )


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


def dump_structure(structure: Structure, where: str) -> bytes:
    """Encode a structure as JSON.

    Raises:
        TransportError: it cannot be rebuilt from JSON.
    """
    spec, kinds, wants = structure
    try:
        classes = register_classes(spec)
        text = pytree.treespec_dumps(spec)
        if pytree.treespec_loads(text) != spec:
            raise NotImplementedError("keys of dicts must be strings or numbers, not tuples")
    except (NotImplementedError, TypeError, ValueError) as error:
        raise TransportError(
            f"{where}: a block returned a structure that cannot travel between stages: {error}; use dicts, lists, "
            "tuples and dataclasses, or register the class with a serialized name in torch.utils._pytree on every rank"
        ) from None
    return json.dumps([text, kinds, [int(w) for w in wants], classes], separators=(",", ":")).encode()


def described_tensors(description: bytes, where: str) -> list[tuple[torch.dtype, list[int]]]:
    """Return types and shapes, as they lie in memory, of the tensors of a message with a described structure."""
    _, kinds, _ = _parse(description, where)
    found = [(getattr(torch, k[1]), k[2], k[3]) for k in kinds if k[0] == "tensor"]
    return [(dtype, shape if order is None else [shape[d] for d in order]) for dtype, shape, order in found]


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


def split(block: Tensor) -> list[Tensor]:
    """Split a block into its header, which is marked as continued, and the rest."""
    block[_CONTINUED] = 1
    return [block[:HEADER_BYTES], block[HEADER_BYTES:]]


def transport_fields(raw: memoryview) -> tuple[int, bool, Credits]:
    """Read from a header the size of the whole block, whether it continues in another send, and the credits."""
    size, _, _, _, _, _, _, continued, _, *credit = _HEADER.unpack_from(raw)
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


def _parse(meta: bytes, where: str) -> Structure:
    try:
        spec, kinds, wants, classes = json.loads(meta)
        find_classes(classes)
        return pytree.treespec_loads(spec), kinds, tuple(map(bool, wants))
    except (ValueError, NotImplementedError) as error:
        raise TransportError(f"{where}: cannot read the structure of a message: {error}") from None


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


def leaves_of(tree: Any) -> Sequence[Any]:
    """The leaves of a pytree; without a walk where it is a tensor, or a list or tuple of tensors and None."""
    if isinstance(tree, Tensor):
        return (tree,)
    if type(tree) in (list, tuple):
        for leaf in tree:
            if leaf is not None and not isinstance(leaf, Tensor):
                break
        else:
            return tree  # type: ignore[no-any-return]
    return pytree.tree_leaves(tree)


def detached(tree: Any) -> tuple[Any, tuple[bool, ...]]:
    """Detach the tensors of a pytree from their graph; also return which of its leaves want a gradient."""
    if isinstance(tree, Tensor):
        return tree.detach(), (tree.requires_grad,)
    leaves, spec = pytree.tree_flatten(tree)
    wants = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(plain, spec), wants
