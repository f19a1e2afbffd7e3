"""A moment that all ranks agree on, though their clocks differ: by measurements along a tree."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch.distributed as dist

from penstock.comm.collective import control_plane
from penstock.comm.collective.control_plane import common_origin
from support.pool import Pool


def ahead(group: dist.ProcessGroup) -> tuple[float, int]:
    """The common moment on the true clock, where that of rank r is 100 r seconds ahead; and with how many it spoke."""
    shift, clock, peers = 100.0 * dist.get_rank(group), time.perf_counter, Counter[int]()
    send = dist.send

    def counting(tensor: object, *, group_dst: int, group: dist.ProcessGroup) -> None:
        peers[group_dst] += 1
        send(tensor, group_dst=group_dst, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_plane.time, "perf_counter", lambda: clock() + shift)
        patch.setattr(dist, "send", counting)
        return common_origin(group) - shift, len(peers)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_clocks_that_differ_show_the_same_moment(pool: Pool, ranks: int) -> None:
    moments, peers = zip(*pool.submit(ahead, ranks=ranks), strict=True)
    assert max(moments) - min(moments) < 5.0
    assert max(peers) <= 2  # of four ranks, the first speaks with the third and the second
