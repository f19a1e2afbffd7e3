"""Messages between stages go before the pieces of a sum, and the sum has the same bits."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective import all_reduce
from penstock.comm.collective.all_reduce import GlooReducer
from penstock.comm.collective.in_pieces import Piece, TransferPriority, in_pieces
from penstock.comm.core.rank_grid import Holder
from penstock.comm.p2p.gloo import SendLane
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.schedule.ir.schedule import Payload, Stage
from penstock.schedule.machine.instructions import LaneKey
from support.pool import Pool

PIECE = 1000  # elements, in these tests


def under_way(messages_amid: Collection[int], pieces: int = 12, ahead: int = 4) -> list[int]:
    """How many pieces of a sum are under way with each one that is posted, itself included.

    Args:
        messages_amid: the pieces while which are posted a message between stages is, too.
        pieces: how many there are.
        ahead: how many may be under way.
    """
    priority, posted, found = TransferPriority(), set[int](), list[int]()

    def piece(number: int) -> Piece:
        posted.add(number)
        found.append(len(posted))
        if number in messages_amid:
            priority.message()
        yield
        posted.remove(number)

    in_pieces(map(piece, range(pieces)), priority, ahead)
    assert not posted
    return found


def test_several_pieces_are_under_way_where_there_are_no_messages() -> None:
    assert under_way(()) == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]


def test_pieces_go_one_at_a_time_after_a_message_between_stages() -> None:
    assert under_way([5]) == [1, 2, 3, 4, 4, 4, 1, 1, 1, 1, 2, 3]
    assert under_way(range(12)) == [1] * 12


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


def sum_beside_messages(elements: Sequence[int], first: float) -> tuple[list[str], float]:
    """Add up tensors while a lane posts a message of 50 elements with each piece.

    Args:
        elements: of the tensors.
        first: seconds that pass in each of the first waits for a peer.

    Returns:
        What was sent, in order, and the seconds that it took.
    """
    log, priority, late = list[str](), TransferPriority(), iter([first] * 12)
    lane = SendLane(LaneKey(0, 1, Payload.ACTIVATION), 2, None)
    lane.priority, lane._messages = priority, Recorded("message", log)  # type: ignore[assignment]

    class Parts(Recorded):
        def send(self, tensor: Tensor, rank: int) -> None:
            super().send(tensor, rank)
            lane.send(TensorMessage(Header(0, 0, True), torch.zeros(50), (False,)))

        def finish(self, works: object) -> None:
            time.sleep(next(late, 0.0))

    reducer = GlooReducer(lambda holder: holder.pipeline, None, {}, priority=priority)
    reducer._parts, reducer._sums = Parts("part", log), Recorded("sum", log)  # type: ignore[assignment]
    begun = time.perf_counter()
    with patch.object(all_reduce, "PIECE", PIECE):
        reducer._sum([0, 1], 0, {0: [torch.ones(size) for size in elements]})
    return log, time.perf_counter() - begun


def test_messages_of_a_lane_come_between_single_pieces() -> None:
    log, _ = sum_beside_messages([4 * PIECE], 0.0)
    assert log == ["part", "message", "sum"] * 4


def test_a_small_piece_that_was_late_holds_up_no_later_one() -> None:
    """Pieces once waited as long as messages take at their pace: 1 s each, after 0.02 s for 8 bytes."""
    log, seconds = sum_beside_messages([2] * 8 + [5 * PIECE], 0.02)
    assert seconds < 1.0
    assert log.count("part") == log.count("message") == 6


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
