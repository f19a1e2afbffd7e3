"""A clock that all ranks share, so that one timeline can hold the events of all."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from penstock.comm.collective.all_gather_json import collective

_PINGS = 8


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
