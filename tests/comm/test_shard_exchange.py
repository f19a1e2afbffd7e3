"""Reduce-scatter and all-gather of shards: sums in order, in many pieces, and half the bytes of an all-reduce each."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective import shard_exchange
from penstock.comm.collective.in_pieces import cut, packed, unpack
from penstock.comm.collective.shard_exchange import GlooShards, LocalShards
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.tagged_group import TaggedGroup
from penstock.schedule.ir.schedule import Stage
from support.pool import Pool

SIZES = ((5, 0, 17), (40, 3), (0,))  # of the tensors of each member's shard
STAGE = Stage(0, 0, 0)


def shards_of(place: int, width: int) -> list[list[Tensor]]:
    """Flat tensors, of which every other one is in float64."""
    draw = torch.Generator().manual_seed(place)
    made: list[list[Tensor]] = []
    for sizes in SIZES[:width]:
        made.append([])
        for i, size in enumerate(sizes):
            made[-1].append(torch.randn(size, generator=draw, dtype=(torch.float32, torch.float64)[i % 2]))
    return made


def in_order(width: int) -> list[list[Tensor]]:
    """The sums over all members."""
    total, *others = (shards_of(place, width) for place in range(width))
    for other in others:
        for mine, theirs in zip(total, other, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                a.add_(b)
    return total


def exchange(group: dist.ProcessGroup, piece: int) -> tuple[list[list[Tensor]], list[list[Tensor]], dict[str, int]]:
    """What one process has after a reduce-scatter, and after a gather of that; and the bytes that it has sent."""
    width, place = dist.get_world_size(group), dist.get_rank(group)
    members = tuple(Holder(p, STAGE) for p in range(width))
    sent = {"sum": 0, "gather": 0}
    now = "sum"
    send = TaggedGroup.send

    def counted(self: TaggedGroup, tensor: Tensor, rank: int) -> Any:
        sent[now] += tensor.nbytes
        return send(self, tensor, rank)

    shards = shards_of(place, width)
    exchanges = GlooShards(lambda holder: holder.pipeline, group)
    with patch.object(shard_exchange, "PIECE", piece), patch.object(TaggedGroup, "send", counted):
        exchanges.scatter(members, members[place], 0, shards).wait(20.0, "the sum")
        summed = [[tensor.clone() for tensor in shard] for shard in shards]
        now = "gather"
        exchanges.gather(members, members[place], 1, shards).wait(20.0, "the gather")
    exchanges.close()
    return summed, shards, sent


def same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True))


@pytest.mark.parametrize(("width", "piece"), [(2, 14), (3, 14), (3, 1 << 18)])
def test_between_processes(pool: Pool, width: int, piece: int) -> None:
    wanted = in_order(width)
    owned = [sum(tensor.nbytes for tensor in shard) for shard in wanted]
    for place, (summed, gathered, sent) in enumerate(pool.submit(exchange, piece, ranks=width)):
        assert same([summed[place]], [wanted[place]])
        before = shards_of(place, width)
        assert all(same([summed[i]], [before[i]]) for i in range(width) if i != place)  # nobody writes these
        assert same(gathered, wanted)
        assert sent == {"sum": sum(owned) - owned[place], "gather": (width - 1) * owned[place]}


@pytest.mark.parametrize("width", [1, 2, 3])
def test_within_a_process(width: int) -> None:
    members, local, wanted = tuple(Holder(p, STAGE) for p in range(width)), LocalShards(), in_order(width)
    everyone = [shards_of(place, width) for place in range(width)]
    tickets = [local.scatter(members, me, 0, everyone[me.pipeline]) for me in reversed(members)]
    assert all(ticket.done for ticket in tickets)
    for place, shards in enumerate(everyone):
        assert same([shards[place]], [wanted[place]])
    tickets = [local.gather(members, me, 1, everyone[me.pipeline]) for me in members[:-1]]
    assert not any(ticket.done for ticket in tickets)
    local.gather(members, members[-1], 1, everyone[-1])
    assert all(ticket.done for ticket in tickets)
    assert all(same(shards, wanted) for shards in everyone)


def test_groups_of_pieces_end_where_a_format_does() -> None:
    tensors = [torch.arange(5.0), torch.arange(3.0), torch.arange(4.0).double(), torch.arange(0.0)]
    groups = cut(tensors, 6)
    assert [[t.numel() for t in group] for group in groups] == [[5, 1], [2], [4]]
    assert [packed(group).dtype for group in groups] == [torch.float32, torch.float32, torch.float64]
    assert packed(groups[1]) is groups[1][0]
    unpack(packed(groups[0]) + 1, groups[0])
    assert torch.equal(tensors[0], torch.arange(5.0) + 1)
    assert tensors[1].tolist() == [1.0, 1.0, 2.0]
