"""Collective calls on process groups, with errors that say what the ranks were doing when a peer was lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.comm.core.tagged_group import Tag, TaggedGroup, Work
from penstock.comm.core.ticket import brief
from penstock.errors import TransportError


class DifferentCallsError(TransportError):
    """Ranks have made different calls: all of them hear of it, and nothing has begun."""


@contextmanager
def collective(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn torch's error about a lost peer into one that names the collective operation.

    Args:
        what: the operation, such as "agreeing to start run()".
        group: the ranks that take part.

    Raises:
        TransportError: a peer is dead, or did not take part within the group's time-out.
    """
    try:
        yield
    except RuntimeError as error:
        reason = f"a peer is dead or stalled, or has not made this call, which all ranks make together ({brief(error)})"
        raise TransportError(f"rank {dist.get_rank(group)}, {what}: {reason}") from error


def gather_json(value: Any, what: str, group: dist.ProcessGroup | None, timeout: timedelta | None = None) -> list[Any]:
    """Gather a JSON value from every rank, in rank order; JSON, so that no pickle is loaded.

    Values go up a binomial tree to rank 0, and the list comes back down; what ranks in a row have in common travels
    once. These are plain messages, because torch's
    all_gather leaves tensors to a thread of its own, which may abort a process that exits at once.

    Args:
        value: of this rank.
        what: the operation, for error messages.
        group: the ranks.
        timeout: how long to wait for each message; the time-out of the group if None.

    Raises:
        TransportError: a peer is dead, or did not take part in time.
        DifferentCallsError: a peer made another call.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    messages = TaggedGroup(group, Tag.GATHER, timeout)
    runs: list[_Run] = [[1, what, json.loads(json.dumps(value))]]  # of this rank and of ranks after it
    level = 1
    with collective(what, group):
        while level < size and not rank & level:
            if rank + level < size:
                _append(runs, receive_json(messages, rank + level))
            level *= 2
        if rank:
            send_json(messages, runs, rank - level)
            runs = receive_json(messages, rank - level)
        while level := level // 2:
            if rank + level < size:
                send_json(messages, runs, rank + level)
    peer = 0
    for count, said, _ in runs:
        if said != what:
            raise DifferentCallsError(
                f"rank {rank} is {what}, but rank {peer} is {said}; all ranks make such calls together, in one order"
            )
        peer += count
    return [deepcopy(one) if again else one for count, _, one in runs for again in range(count)]


_Run = list[Any]
"""How many ranks in a row have said the same; the operation, and the value."""


def _append(runs: list[_Run], more: list[_Run]) -> None:
    """Append runs of further ranks; ranks that agree cost no more than one of them."""
    last, first = runs[-1], more[0]
    if last[1:] == first[1:] and json.dumps(last[1:]) == json.dumps(first[1:]):  # 1, 1.0 and true are equal
        last[0] += first[0]
        more = more[1:]
    runs += more


def send_json(messages: TaggedGroup, value: Any, rank: int) -> None:
    """Send a JSON value to a rank, and wait until it is sent.

    Raises:
        RuntimeError: the peer is dead, or does not take it in time.
    """
    messages.finish(post_json(messages, value, rank))


def post_json(messages: TaggedGroup, value: Any, rank: int) -> list[Work | None]:
    """Start to send a JSON value to a rank.

    Raises:
        RuntimeError: the peer is dead.
    """
    block = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [messages.send(torch.tensor([block.numel()]), rank), messages.send(block, rank)]


def receive_json(messages: TaggedGroup, rank: int) -> Any:
    """Receive a JSON value from a rank.

    Raises:
        RuntimeError: the peer is dead, or sends nothing in time.
    """
    size = torch.zeros(1, dtype=torch.int64)
    messages.finish([messages.receive(size, rank)])
    block = torch.empty(int(size), dtype=torch.uint8)
    messages.finish([messages.receive(block, rank)])
    return json.loads(bytes(block.numpy()))
