"""Rank 0 makes something for a whole job, and hands it out: to all ranks, or to each rank a part of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.comm.collective.gather import collective, receive_json, send_json
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.errors import CapabilityError, ConfigError, DataError, DeadlockError, ScheduleError, TransportError

_KINDS = {kind.__name__: kind for kind in (CapabilityError, ConfigError, DataError, DeadlockError, ScheduleError)}


class HandedOut(NamedTuple):
    """What rank 0 hands out, all of it JSON values.

    Attributes:
        common: for all ranks.
        part: makes that of another rank; None for no parts.
    """

    common: Any
    part: Callable[[int], Any] | None = None


def from_first(make: Callable[[], Any], what: str, group: dist.ProcessGroup | None) -> Any:
    """Return on all ranks what a function, which is called on rank 0 only, has returned there: a JSON value.

    Args, Raises: as of `hand_out`.
    """
    return hand_out(lambda: HandedOut(make()), what, group)[0]


def hand_out(make: Callable[[], HandedOut], what: str, group: dist.ProcessGroup | None) -> tuple[Any, Any]:
    """Give every rank what rank 0 has made; all ranks call this together.

    What is common goes down a binomial tree; parts go directly, so that no rank carries those of others.

    Args:
        make: called on rank 0 only; what it raises is raised there, and said on all other ranks.
        what: the operation, for error messages.
        group: the ranks.

    Returns:
        What is common, and the part of this rank; None for the part of rank 0.

    Raises:
        ConfigError, DataError, ScheduleError, CapabilityError: `make` has raised it.
        TransportError: a peer is dead, or did not take part within the group's time-out; or, on the other ranks, `make`
            has raised something else.
    """
    rank, messages = dist.get_rank(group), TaggedGroup(group, Tag.PARTS)
    if rank:
        told = _pass_on(None, messages, what)
        if told["failed"] is not None:
            raise _failure(what, *told["failed"])
        with collective(what, group):
            return told["common"], receive_json(messages, 0) if told["parts"] else None
    try:
        common, part = make()
    except Exception as error:
        _pass_on({"failed": [type(error).__name__, str(error)]}, messages, what)
        raise
    _pass_on({"failed": None, "common": common, "parts": part is not None}, messages, what)
    if part is not None:
        with collective(what, group):
            for other in range(1, dist.get_world_size(group)):
                send_json(messages, part(other), other)
    return common, None


def _pass_on(told: Any, messages: TaggedGroup, what: str) -> Any:
    """Take a value from the rank above in the tree, but on rank 0, and pass it on to those below; return it."""
    rank, size = dist.get_rank(messages.group), dist.get_world_size(messages.group)
    low = rank & -rank or 1 << (size - 1).bit_length()  # the ranks up to here hear from this one
    with collective(what, messages.group):
        if rank:
            told = receive_json(messages, rank - low)
        while low := low // 2:
            if rank + low < size:
                send_json(messages, told, rank + low)
    return told


def _failure(what: str, kind: str, said: str) -> Exception:
    """What rank 0 has raised, to be raised on this rank as well."""
    known = _KINDS.get(kind)
    return TransportError(f"rank 0, {what}, failed: {kind}: {said}") if known is None else known(said)
