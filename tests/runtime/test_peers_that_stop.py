"""A peer that is stopped (SIGSTOP) while a message is on its way: the wait for the rest of it is bounded, too."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p import gloo
from penstock.comm.p2p.gloo import GlooTransport
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey
from support.cases import Case, make_batches, make_blocks
from support.pool import Pool
from support.runtime_faults import what_happens

pytestmark = pytest.mark.processes
LARGE = 1 << 24  # elements: more than sockets hold, so a stopped process has not sent them all
PATIENCE = 1.0
FORTH, BACK = LaneKey(0, 1, Payload.ACTIVATION), LaneKey(1, 0, Payload.GRADIENT)
WINDOW = 2
STOPPED = r"a message has stopped on its way for 1 seconds; the peer is stalled or dead"


def submit(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns on two ranks, whose group would wait for half an hour."""
    alone = Pool(2)
    try:
        return alone.submit(function, *args, ranks=2, timeout=40.0)
    finally:
        alone.close()


def others_process(group: dist.ProcessGroup) -> int:
    own, found = torch.tensor([os.getpid()]), [torch.empty(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(found, own, group=group)
    return int(found[1 - dist.get_rank(group)])


@contextmanager
def stopping(process: int, after: int = 0) -> Iterator[None]:
    """Stop a process when the first bytes of a message are seen, after so many messages; later let it go on."""
    come, seen = gloo.has_come, []

    def looks(raw: memoryview, size: int) -> bool:
        if not come(raw, size):
            return False
        seen.append(size)
        if len(seen) == after + 1:
            os.kill(process, signal.SIGSTOP)
        return True

    try:
        with patch.object(gloo, "has_come", looks):
            yield
    finally:
        os.kill(process, signal.SIGCONT)


def sends_half(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    """Rank 1 stops rank 0 as soon as it sees the beginning of an activation."""
    items, other = list(make_blocks(case.model).items()), others_process(group)
    items[3:3] = [("wide", lambda x: x.unsqueeze(-1).repeat(1, 1, 1, LARGE // 64)), ("narrow", lambda x: x[..., 0])]
    changes = {"blocks": dict(items), "balance": (4, 4)}
    if dist.get_rank(group) == 0:
        return what_happens(group, case, make_batches(case), PATIENCE, **changes)
    with stopping(other):
        return what_happens(group, case, make_batches(case), PATIENCE, **changes)


def test_a_sender_that_is_stopped_in_the_midst_of_an_activation() -> None:
    for _ in range(4):  # on a busy machine the thread of the lane may take all messages, and nobody is stopped
        _, (kind, said) = submit(sends_half, Case("1f1b", 2, 2))
        if kind != "nothing":
            break
    assert kind == "TransportError"
    lane = "the activation lane from rank 0 to rank 1"
    waited = f"nothing moved on {lane} within 1 seconds; the peer is stalled or dead"  # if it began late
    # on a busy machine the thread of the lane may take the first messages, so a later one is seen first
    assert re.match(rf"rank 1, stage 1, F\d+: ({lane} broke: {STOPPED}|{waited})", said), said


def message(number: int, size: int) -> TensorMessage:
    return TensorMessage(Header(0, number, True), torch.zeros(size), (False,))


def lanes(group: dist.ProcessGroup) -> GlooTransport:
    patience = timedelta(seconds=PATIENCE)
    return GlooTransport(dist.get_rank(group), (FORTH, BACK), WINDOW, group, patience=patience)


def why(ticket: Ticket, timeout: float) -> str:
    try:
        ticket.wait(timeout, "the test")
    except Exception as error:
        return str(error)
    return ""


def sends_in_one(group: dist.ProcessGroup) -> str:
    """By the fourth message the block is large enough, so nothing is sent apart; it is shorter than those before."""
    other, transport = others_process(group), lanes(group)
    if dist.get_rank(group) == 0:
        tickets = [transport.sender(FORTH).send(message(k, LARGE)) for k in range(3)]
        assert not any(why(ticket, 20.0) for ticket in tickets)
        return why(transport.sender(FORTH).send(message(3, LARGE - 9)), 2.0)
    lane = transport.receiver(FORTH)
    for _ in range(3):
        assert not why(lane.receive(), 20.0)
    with stopping(other):
        return why(lane.receive(), 20.0)


@pytest.mark.long
def test_a_sender_that_is_stopped_in_the_midst_of_a_shorter_message() -> None:
    said = ""
    for _ in range(3):  # on a busy machine all of it may come before anybody sees its beginning
        said = said or submit(sends_in_one)[1]
    assert said == f"the test: the activation lane from rank 0 to rank 1 broke: {STOPPED}"


def takes_half(group: dist.ProcessGroup) -> tuple[str, str]:
    """Rank 1 has posted a RECV, has said so, and is stopped before anything is sent to it."""
    other, transport = others_process(group), lanes(group)
    if dist.get_rank(group) == 1:
        for _ in range(3):  # as above, so that nothing is sent apart
            assert not why(transport.receiver(FORTH).receive(), 20.0)
        transport.receiver(FORTH).receive()
        transport.sender(BACK).send(message(0, 3))
        time.sleep(3600.0)
    for k in range(3):
        assert not why(transport.sender(FORTH).send(message(k, LARGE)), 20.0)
    told = transport.receiver(BACK).receive()
    time.sleep(0.5)
    os.kill(other, signal.SIGSTOP)
    sent = transport.sender(FORTH).send(message(3, LARGE))
    came, said = why(told, 20.0), why(sent, 20.0)
    os.kill(other, signal.SIGKILL)
    return came, said


@pytest.mark.long
def test_a_receiver_that_is_stopped_before_it_has_taken_a_message() -> None:
    alone = Pool(2)
    try:
        came, said = alone.submit(takes_half, ranks=2, victims=[1], timeout=15.0)[0]
    finally:
        alone.close()
    assert came == ""
    assert said == f"the test: the activation lane from rank 0 to rank 1 broke: {STOPPED}"
