"""The control plane: collective calls beside the passes, whose errors say what the ranks did when a peer was lost.

Ranks gather JSON, take over what rank 0 has made for all, compare their clocks, and agree on how to wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from penstock.comm.core.tagged_group import Tag, TaggedGroup, Work
from penstock.comm.core.ticket import LATENCY, SHARED, Polling, brief
from penstock.errors import CapabilityError, ConfigError, DataError, DeadlockError, ScheduleError, TransportError
from penstock.job.cpus import Cpus, parts

_KINDS = {kind.__name__: kind for kind in (CapabilityError, ConfigError, DataError, DeadlockError, ScheduleError)}
_PERIOD = 1.0  # seconds between two messages of rank 0 that it is still at work
_AT_WORK = {"at work": True}
_PINGS = 8
Waits = Literal["auto", "latency", "shared"]


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


def common_origin(group: dist.ProcessGroup | None) -> float:
    """Return the reading of this process's `time.perf_counter` at a moment that is common to all ranks.

    Rank 0 chooses the moment; every other rank measures the offset of its clock from that of the rank above it in a
    binomial tree, by the fastest of several round trips. Offsets below half a round trip, as between processes of one
    host, are taken to be zero.

    Raises:
        TransportError: a peer is dead, or did not take part within the group's time-out.
    """
    with collective("comparing clocks", group):
        return _common_origin(group)


def _common_origin(group: dist.ProcessGroup | None) -> float:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    low = rank & -rank or 1 << (size - 1).bit_length()
    origin = _measure(rank - low, group) if rank else time.perf_counter()
    while low := low // 2:
        if rank + low < size:
            _answer(rank + low, origin, group)
    return origin


def _answer(below: int, origin: float, group: dist.ProcessGroup | None) -> None:
    reading = torch.tensor([0.0, origin], dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(reading[:1], group_src=below, group=group)
        reading[0] = time.perf_counter()
        dist.send(reading, group_dst=below, group=group)


def _measure(above: int, group: dist.ProcessGroup | None) -> float:
    """Return the common moment on this clock, from that on the clock of the rank above."""
    reading = torch.zeros(2, dtype=torch.float64)
    best, offset = float("inf"), 0.0
    for _ in range(_PINGS):
        sent = time.perf_counter()
        dist.send(reading[:1], group_dst=above, group=group)
        dist.recv(reading, group_src=above, group=group)
        back = time.perf_counter()
        if back - sent < best:
            best, offset = back - sent, float(reading[0]) - (sent + back) / 2
    return float(reading[1]) - (offset if abs(offset) > best / 2 else 0.0)


def cores_of_this_rank(group: dist.ProcessGroup | None) -> float | None:
    """Return how many CPUs this process has, by affinity and quota, where all take every CPU once; a collective call.

    Args:
        group: of all ranks; in one process, which has what there is, None is returned.

    Raises:
        TransportError: a peer is dead.
    """
    if group is None:
        return None
    everywhere = gather_json(Cpus.of_this_process().as_json(), "sharing the CPUs", group)
    return parts([Cpus.from_json(cpus) for cpus in everywhere])[dist.get_rank(group)]


def choose_polling(waits: Waits, cores: float | None) -> Polling:
    """Return how this process waits.

    Args:
        waits: "latency" to look, "shared" to sleep, "auto" to sleep where this process has less than a CPU of its own.
        cores: that it has; None in one process, where ranks do not wait.
    """
    if cores is None:
        return LATENCY
    crowded = cores < 1 - 1e-6
    return SHARED if waits == "shared" or (waits == "auto" and crowded) else LATENCY
