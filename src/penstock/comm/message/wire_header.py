"""The 64 bytes at the beginning of a message on its way.

They name batch and microbatch, so that a receiver notices a wrong message, and carry what accompanies the data: whether
another batch follows, when the run is to end, a checksum of the samples, the loss weight of the batch, auxiliary
losses, and how many RECVs the sender has posted on each of its lanes from the receiver (credits, modulo
`CREDIT_RANGE`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor

from penstock.comm.message.tensor_message import Header
from penstock.schedule.ir.schedule import Payload

HEADER_BYTES = 64
_HEADER = struct.Struct("<qqqddIII??5H")
_CONTINUED = 52  # the byte of the header that marks a message whose rest follows as another send
_SIZE = struct.Struct("<q")  # of the whole block, at the beginning of the header
_ARRIVED = 53  # the byte that is always 1, so that it tells in a block that was 0 there whether the header has come
CREDITED = tuple(Payload)  # the lanes that the credits are about
CREDIT_RANGE = 1 << 16  # credits are counted modulo this
NO_CREDITS = (0,) * len(CREDITED)
Credits = Sequence[int]


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
