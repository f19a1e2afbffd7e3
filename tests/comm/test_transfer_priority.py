"""Messages between stages go before the pieces of a sum, and the sum has the same bits."""

from __future__ import annotations

from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective import all_reduce
from penstock.comm.collective.all_reduce import GlooReducer
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.transfer_priority import TransferPriority
from penstock.comm.message.tensor_message import Header, TensorMessage
from penstock.comm.p2p.gloo_send_receive import SendLane
from penstock.schedule.ir.schedule import Payload, Stage
from penstock.schedule.machine.instructions import LaneKey
from support.pool import Pool

PIECE = 1000  # elements, in these tests


class Clock:
    """A time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.time, self.slept = 0.0, list[float]()

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def test_a_message_is_under_way_for_as_long_as_pieces_of_its_size() -> None:
    clock = Clock()
    priority = TransferPriority(clock.now, clock.sleep)
    priority.message(1000)
    assert not priority.yield_to_messages()  # nothing is known of the link yet
    priority.piece(100, 0.01)
    priority.message(1000)
    priority.message(500)
    assert priority.yield_to_messages()
    assert clock.time == pytest.approx(0.15)
    assert not priority.yield_to_messages()


def test_a_piece_that_was_held_up_does_not_make_the_link_slow() -> None:
    clock = Clock()
    priority = TransferPriority(clock.now, clock.sleep)
    for seconds in (0.01, 5.0, 0.02):
        priority.piece(100, seconds)
    priority.message(1000)
    priority.yield_to_messages()
    assert 0.1 < clock.time < 0.13


def test_no_sum_is_held_up_for_ever() -> None:
    clock = Clock()
    priority = TransferPriority(clock.now, clock.sleep)
    priority.piece(1, 10.0)
    priority.message(10**6)
    assert priority.yield_to_messages()
    assert clock.time == pytest.approx(1.0)


class Recorded:
    """Instead of a group: takes down what is sent, and receives zeros at once."""

    def __init__(self, what: str, log: list[str]) -> None:
        self._what, self._log = what, log

    def send(self, tensor: Tensor, rank: int) -> None:
        self._log.append(self._what)

    def receive(self, tensor: Tensor, rank: int) -> None:
        tensor.zero_()

    def finish(self, works: object) -> None:
        """Nothing is under way."""


def test_no_piece_is_posted_while_a_message_is_under_way() -> None:
    """Of a sum of ten pieces; the message is posted amid the fifth."""
    log, clock = list[str](), Clock()
    priority = TransferPriority(clock.now, lambda seconds: (log.append("yielded"), clock.sleep(seconds))[1])
    priority.piece(PIECE, 0.001)
    lane = SendLane(LaneKey(0, 1, Payload.ACTIVATION), 2, None)
    lane.priority, lane._messages = priority, Recorded("message", log)  # type: ignore[assignment]

    class Parts(Recorded):
        def send(self, tensor: Tensor, rank: int) -> None:
            super().send(tensor, rank)
            if log.count("part") == 5:
                lane.send(TensorMessage(Header(0, 0, True), torch.zeros(50), (False,)))

    reducer = GlooReducer(lambda holder: holder.pipeline, None, {}, priority=priority)
    reducer._parts, reducer._sums = Parts("part", log), Recorded("sum", log)  # type: ignore[assignment]
    with patch.object(all_reduce, "PIECE", PIECE):
        reducer._sum([0, 1], 0, {0: [torch.ones(10 * PIECE)]})
    assert (log.count("part"), log.count("sum"), log.count("message")) == (10, 10, 1)
    after = log[log.index("message") + 1 :]
    assert "part" not in after[: after.index("yielded")]
    assert after.count("part") == 5


def sums(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
    """What this rank brings, and the sums; each rank is another number of pieces ahead."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    members = tuple(Holder(r, Stage(0, 0, 0)) for r in range(ranks))
    generator = torch.Generator().manual_seed(rank)
    brought = [torch.randn(size, generator=generator) for size in (10 * PIECE + 7, 3, PIECE)]
    totals = [tensor.clone() for tensor in brought]
    with patch.object(all_reduce, "PIECE", PIECE), patch.object(all_reduce, "AHEAD", 1 + 2 * rank):
        reducer: Any = GlooReducer(lambda holder: holder.pipeline, group, {})
        reducer.reduce(members, members[rank], 0, totals).wait(20.0, "the test")
        reducer.close()
    return brought, totals


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_in_pieces_have_the_bits_of_a_sum_in_order(pool: Pool, ranks: int) -> None:
    brought, totals = zip(*pool.submit(sums, ranks=ranks), strict=True)
    wanted = [reduce(torch.add, tensors) for tensors in zip(*brought, strict=True)]
    for found in totals:
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
