"""A clock that all ranks share, so that one timeline can hold the events of all."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from penstock.comm.collective.gather import collective

_PINGS = 8


def common_origin(group: dist.ProcessGroup | None) -> float:
    """Return the reading of this process's `time.perf_counter` at a moment that is common to all ranks.

    Rank 0 chooses the moment; every other rank measures the offset of its clock by the fastest of several round trips.
    Offsets below half a round trip, as between processes of one host, are taken to be zero.

    Raises:
        TransportError: a peer is dead, or did not take part within the group's time-out.
    """
    with collective("comparing clocks", group):
        return _common_origin(group)


def _common_origin(group: dist.ProcessGroup | None) -> float:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    origin = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.broadcast(origin, group_src=0, group=group)
    moment = float(origin)
    offset = 0.0
    for other in range(1, size):
        if rank == 0:
            _answer(other, group)
        elif rank == other:
            offset = _measure(group)
    return moment - offset


def _answer(other: int, group: dist.ProcessGroup | None) -> None:
    reading = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(reading, group_src=other, group=group)
        reading[0] = time.perf_counter()
        dist.send(reading, group_dst=other, group=group)


def _measure(group: dist.ProcessGroup | None) -> float:
    """Return rank 0's clock minus this one."""
    reading = torch.zeros(1, dtype=torch.float64)
    best, offset = float("inf"), 0.0
    for _ in range(_PINGS):
        sent = time.perf_counter()
        dist.send(reading, group_dst=0, group=group)
        dist.recv(reading, group_src=0, group=group)
        back = time.perf_counter()
        if back - sent < best:
            best, offset = back - sent, float(reading) - (sent + back) / 2
    return offset if abs(offset) > best / 2 else 0.0
