"""Rank 0 hands out what it alone has made: something to all ranks, and to each rank a part of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from penstock.comm.collective.gather import collective, receive_json, send_json
from penstock.comm.core.tagged_group import Tag, TaggedGroup


def hand_out(
    common: Any, part: Callable[[int], Any] | None, what: str, group: dist.ProcessGroup | None
) -> tuple[Any, Any]:
    """Give a JSON value to every rank, and to each another one of its own; all ranks call this together.

    What is common goes down a binomial tree; parts go directly, so that no rank carries those of others.

    Args:
        common: for all; of rank 0.
        part: makes that of a rank; of rank 0, and None there for no parts.
        what: the operation, for error messages.
        group: the ranks.

    Returns:
        What is common, and the part of this rank; on rank 0 `common` as it was given, and None.

    Raises:
        TransportError: a peer is dead, or did not take part within the group's time-out.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    messages = TaggedGroup(group, Tag.PARTS)
    low = rank & -rank or 1 << (size - 1).bit_length()  # below it are the ranks that hear from this one
    with collective(what, group):
        told = [common, part is not None] if not rank else receive_json(messages, rank - low)
        while low := low // 2:
            if rank + low < size:
                send_json(messages, told, rank + low)
        own = None
        if rank:
            own = receive_json(messages, 0) if told[1] else None
        elif part is not None:
            for other in range(1, size):
                send_json(messages, part(other), other)
    return told[0], own
