"""Hands out what rank 0 has made for a whole job: all of it to every rank, or a part to each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.comm.collective.all_gather_json import collective, post_json, receive_json, send_json
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.errors import CapabilityError, ConfigError, DataError, DeadlockError, ScheduleError, TransportError

_KINDS = {kind.__name__: kind for kind in (CapabilityError, ConfigError, DataError, DeadlockError, ScheduleError)}

_PERIOD = 1.0  # seconds between two messages of rank 0 that it is still at work
_AT_WORK = {"at work": True}


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

    What is common goes down a binomial tree; parts go directly, so that no rank carries those of others. Rank 0 may
    take as long as it needs: every second it tells the others that it is at work, so only its silence ends the wait.

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
        with _telling(messages):
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


@contextmanager
def _telling(messages: TaggedGroup) -> Iterator[None]:
    """Tell the ranks below rank 0 again and again that it is at work."""
    lock, over = threading.Lock(), threading.Event()
    # The thread never gives up on a rank that comes late, as that would end the group; sending what was made does.
    patient = TaggedGroup(messages.group, Tag.PARTS, timedelta(days=1))

    def tell() -> None:
        with suppress(RuntimeError):  # a rank is dead, of which sending what was made will tell
            while not over.wait(_PERIOD):
                with lock:  # nothing after what was made
                    works = (
                        [] if over.is_set() else [w for r in _below(patient) for w in post_json(patient, _AT_WORK, r)]
                    )
                patient.finish(works)

    threading.Thread(target=tell, name="penstock at work", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()


def _below(messages: TaggedGroup) -> Sequence[int]:
    """The ranks that hear from this one in the binomial tree, farthest first."""
    rank, size = dist.get_rank(messages.group), dist.get_world_size(messages.group)
    low, found = rank & -rank or 1 << (size - 1).bit_length(), []
    while low := low // 2:
        if rank + low < size:
            found.append(rank + low)
    return found


def _pass_on(told: Any, messages: TaggedGroup, what: str) -> Any:
    """Take a value from the rank above in the tree, but on rank 0, and pass it on to those below; return it."""
    rank = dist.get_rank(messages.group)
    with collective(what, messages.group):
        while True:
            if rank:
                told = receive_json(messages, rank - (rank & -rank))
            for below in _below(messages):
                send_json(messages, told, below)
            if told != _AT_WORK:
                return told


def _failure(what: str, kind: str, said: str) -> Exception:
    """What rank 0 has raised, to be raised on this rank as well."""
    known = _KINDS.get(kind)
    return TransportError(f"rank 0, {what}, failed: {kind}: {said}") if known is None else known(said)
