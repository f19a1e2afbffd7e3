"""Messages of different kinds share a process group without mix-ups, and control scalars may be any NamedTuple."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from penstock.comm.collective.control_reduce import ControlReduce, GlooControlReduce, LocalControlReduce
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.gloo import _TAGS
from penstock.schedule.ir.schedule import Stage
from support.pool import Pool

HOLDERS = [Holder(0, Stage(index, 0, rank)) for index, rank in enumerate((0, 1, 1))]


class Point(NamedTuple):
    x: float
    y: float


def add_points(points: list[Point]) -> Point:
    """A function of the fields by name, so that it needs the type of the contributions, not only their values."""
    return Point(sum(p.x for p in points), max(p.y for p in points))


def test_no_two_kinds_of_messages_have_one_tag() -> None:
    lanes = [tag + second for tag in _TAGS.values() for second in (0, 1)]
    others = [tag for tag in Tag.__members__.values() if tag != Tag.LANES]
    assert len({*lanes, *others, 0}) == len(lanes) + len(Tag.__members__)  # 0: the comparison of clocks
    assert min(lanes) == Tag.LANES > max(others)


def exchange(group: dist.ProcessGroup) -> list[float]:
    """Rank 0 sends under two tags; rank 1 receives them in the other order, and an empty tensor in between."""
    first, second = TaggedGroup(group, Tag.WAVES), TaggedGroup(group, Tag.AVERAGES)
    tensors = [torch.full((2,), float(value)) for value in (1, 2)]
    if dist.get_rank(group) == 0:
        works = [first.send(tensors[0], 1), first.send(torch.empty(0), 1), second.send(tensors[1], 1)]
        assert works[1] is None
        first.finish(works)
        return []
    found = [torch.empty(2) for _ in tensors]
    second.finish([second.receive(found[1], 0)])
    first.finish([first.receive(torch.empty(0), 0), first.receive(found[0], 0)])
    return [float(tensor.sum()) for tensor in found]


@pytest.mark.processes
def test_tags_keep_messages_apart(pool: Pool) -> None:
    assert pool.submit(exchange, ranks=2) == [[], [2.0, 4.0]]


def contribute(reduce: ControlReduce, rank: int | None) -> list[Point]:
    tickets = []
    for number, holder in enumerate(HOLDERS):
        if rank in (None, holder.stage.rank):
            tickets.append(Ticket("the sum"))
            reduce.contribute(holder, 7, Point(10.0**number, float(number)), tickets[-1])
    for ticket in tickets:
        ticket.wait(60.0, "adding points")
    reduce.close()
    return [ticket.result for ticket in tickets]


def over_gloo(group: dist.ProcessGroup) -> list[Point]:
    return contribute(
        GlooControlReduce(HOLDERS, lambda holder: holder.stage.rank, group, add_points), dist.get_rank(group)
    )


def test_any_named_tuple_can_be_added() -> None:
    found = contribute(LocalControlReduce(HOLDERS, add_points), None)
    assert found == [Point(111.0, 2.0)] * 3
    assert {type(point) for point in found} == {Point}


@pytest.mark.processes
def test_any_named_tuple_can_be_added_between_processes(pool: Pool) -> None:
    found = [point for points in pool.submit(over_gloo, ranks=2) for point in points]
    assert found == [Point(111.0, 2.0)] * 3
    assert {type(point) for point in found} == {Point}
