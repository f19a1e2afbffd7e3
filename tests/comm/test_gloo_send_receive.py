"""Lanes over gloo: arrivals are seen in the block, credits tell which SENDs were taken, and threads do the rest."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.codec import CREDIT_RANGE
from penstock.comm.p2p.gloo import GlooTransport
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey
from support.pool import Pool

pytestmark = pytest.mark.processes
FORTH, BACK = LaneKey(0, 1, Payload.ACTIVATION), LaneKey(1, 0, Payload.GRADIENT)
WINDOW = 2


class Rank:
    """One rank with a lane to the other one and a lane back; `sends` and `receives` are its ends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        self.transport = GlooTransport(rank, (FORTH, BACK), WINDOW, group)
        self.out, self.back = (FORTH, BACK) if rank == 0 else (BACK, FORTH)
        self.sends, self.receives = self.transport.sender(self.out), self.transport.receiver(self.back)

    def send(self, number: int, size: int = 3) -> Ticket:
        tensor = torch.full((size,), float(number))
        return self.sends.send(TensorMessage(Header(0, number, True), tensor, (False,)))

    def receive(self) -> Ticket:
        return self.receives.receive()

    @property
    def threads(self) -> tuple[bool, bool]:
        return self.sends.background._started, self.receives.background._started


def number_in(ticket: Ticket, timeout: float = 20.0) -> tuple[int, float, int]:
    """The number of a message, its first element and its size."""
    ticket.wait(timeout, "the test")
    message: TensorMessage = ticket.result
    return message.header.first, float(message.tree[0]), message.tree.numel()


def play_ping_pong(group: dist.ProcessGroup) -> Any:
    """Rank 0 sends with two messages under way, rank 1 answers each; who has waited for a thread, and what was open."""
    me, rank, found, done = Rank(group), dist.get_rank(group), [], []
    posted = [me.receive(), me.receive()]
    sent = [me.send(k) for k in range(2)] if rank == 0 else []
    for k in range(30):
        found.append(number_in(posted.pop(0)))
        posted.append(me.receive())
        sent.append(me.send(k + 2 * (rank == 0)))
        done.append(all(ticket.done for ticket in sent[:-WINDOW]))
    return found, all(done[WINDOW:]), me.threads


def test_steady_exchange_needs_no_thread(pool: Pool) -> None:
    """Each message that comes back says which SENDs were taken."""
    for found, all_taken, threads in pool.submit(play_ping_pong, ranks=2, fresh=True):
        assert found == [(k, float(k), 3) for k in range(30)]
        assert all_taken
        assert threads == (False, False)


def send_without_answer(group: dist.ProcessGroup) -> Any:
    me = Rank(group)
    if dist.get_rank(group) == 0:
        ticket = me.send(7)
        before = ticket.done
        ticket.wait(20.0, "the test")
        return before, ticket.done, me.threads
    time.sleep(0.2)
    return number_in(me.receive())


def test_a_thread_waits_where_nothing_comes_back(pool: Pool) -> None:
    sender, receiver = pool.submit(send_without_answer, ranks=2, fresh=True)
    assert sender == (False, True, (True, False))
    assert receiver == (7, 7.0, 3)


def wait_long(group: dist.ProcessGroup) -> Any:
    """Rank 1 waits longer than it looks; what it posts meanwhile and afterwards still comes in order."""
    me = Rank(group)
    if dist.get_rank(group) == 0:
        time.sleep(1.6)
        return [me.send(k).settles(20.0) for k in range(6)]
    first, second = me.receive(), me.receive()
    found, threads = [number_in(first)], [me.threads[1]]
    rest = [me.receive() for _ in range(2)]
    found += [number_in(second), *map(number_in, rest)]
    found += [number_in(me.receive()) for _ in range(2)]
    return found, threads


def test_long_waits_are_left_to_a_thread_and_keep_the_order(pool: Pool) -> None:
    sent, (found, threads) = pool.submit(wait_long, ranks=2, fresh=True)
    assert all(sent)
    assert threads == [True]
    assert [number for number, *_ in found] == list(range(6))


SIZES = (3, 3000, 10, 9000, 9000, 40000, 1)


def send_growing(group: dist.ProcessGroup) -> Any:
    """Messages larger than all before: they are taken as soon as their RECV is posted, not when they are consumed."""
    me = Rank(group)
    if dist.get_rank(group) == 0:
        return [me.send(k, size).settles(20.0) for k, size in enumerate(SIZES)]
    found = []
    posted = [me.receive(), me.receive()]
    for _ in SIZES:
        time.sleep(0.05)
        found.append(number_in(posted.pop(0)))
        posted.append(me.receive())
    return found


def test_messages_that_grow(pool: Pool) -> None:
    sent, found = pool.submit(send_growing, ranks=2, fresh=True)
    assert all(sent)
    assert found == [(k, float(k), size) for k, size in enumerate(SIZES)]


def take_credits(group: dist.ProcessGroup) -> Any:
    """Rank 0 is told how many RECVs were posted: what it knew already, too little, a round of the counter later."""
    me = Rank(group)
    if dist.get_rank(group) == 1:
        return [number_in(me.receive()) for _ in range(4)]
    lane, told = me.sends, []
    lane._taken = CREDIT_RANGE - 2  # as after so many messages
    lane._count = CREDIT_RANGE - 2
    tickets = [me.send(k) for k in range(4)]
    for posted in (CREDIT_RANGE - 2, CREDIT_RANGE - 3, CREDIT_RANGE - 1, 1, 0, 2):
        lane.credit(posted % CREDIT_RANGE)
        told.append([ticket.done for ticket in tickets].count(True))
    return told


def test_credits_only_grow_and_their_counter_may_run_over(pool: Pool) -> None:
    told, _ = pool.submit(take_credits, ranks=2, fresh=True)
    assert told == [0, 0, 1, 3, 3, 4]


def lose_peer(group: dist.ProcessGroup) -> str:
    me = Rank(group)
    if dist.get_rank(group) == 1:
        os._exit(3)
    ticket = me.receive()
    try:
        ticket.wait(30.0, "F0")
    except Exception as error:
        return str(error)
    return "nothing"


def test_a_lost_peer_is_noticed_while_looking(pool: Pool) -> None:
    start = time.monotonic()
    said = pool.submit(lose_peer, ranks=2, fresh=True, victims=[1])[0]
    assert "F0: the gradient lane from rank 1 to rank 0 broke: " in said
    assert time.monotonic() - start < 15.0
    pool.close()
