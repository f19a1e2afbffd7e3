"""The memory of a sent message is written again only once its send is over, however the sender learns of that.

Instead of a network, `Slow` takes the bytes of a message at the last moment: when the wait for its send ends. Whatever
has been written into its memory until then is what the peer receives.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.codec import Codec, bytes_of, transport_fields
from penstock.comm.p2p.gloo import SendLane
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.errors import TransportError
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey

LANE = LaneKey(0, 1, Payload.ACTIVATION)
SMALL, LARGE = 10, 3000  # numbers in a message that travels as one send, and in one that begins as two


class Sending:
    """A send that takes its bytes when it has been waited for; a test may hold that up, or let it fail."""

    def __init__(self, block: Tensor) -> None:
        self.block, self.taken = block, torch.empty(0, dtype=torch.uint8)
        self.waited, self.goes_on, self.stalls = threading.Event(), threading.Event(), False
        self.goes_on.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited.set()
        if self.stalls:
            raise RuntimeError("Timed out waiting for a send")
        assert self.goes_on.wait(20.0)
        self.taken = self.block.clone()


class Slow:
    """A link on which a message leaves the memory of its sender as late as may be."""

    def __init__(self) -> None:
        self.sent: list[Sending] = []

    def send(self, block: Tensor, rank: int) -> Sending:
        self.sent.append(Sending(block))
        return self.sent[-1]

    def finish(self, works: Sequence[Sending], timeout: timedelta | None = None) -> None:
        for work in works:
            work.wait()


class Sender:
    """The sending end of a lane over such links, and what its peer receives."""

    def __init__(self) -> None:
        self.lane, self.link, self.rests, self.count = SendLane(LANE, 2, None), Slow(), Slow(), 0
        self.lane._messages, self.lane._rests = self.link, self.rests  # type: ignore[assignment]

    def send(self, size: int = SMALL) -> Ticket:
        tensor = torch.full((size,), float(self.count))
        self.count += 1
        return self.lane.send(TensorMessage(Header(0, self.count - 1, True), tensor, (False,)))

    def memory(self) -> list[int]:
        """The addresses of all messages so far."""
        return [sending.block.data_ptr() for sending in self.link.sent]

    def received(self) -> list[tuple[int, float, float]]:
        """The number of each message, and its first and last element, once all sends are over."""
        self.lane.hand_over()
        self.lane.close()
        everything, until = [*self.link.sent, *self.rests.sent], time.monotonic() + 20.0
        while not all(sending.taken.numel() for sending in everything):
            assert time.monotonic() < until
            time.sleep(1e-4)
        codec, rests, found = Codec("the peer"), iter(self.rests.sent), []
        for sending in self.link.sent:
            _, continued, _ = transport_fields(bytes_of(sending.taken))
            message = codec.decode(torch.cat([sending.taken, next(rests).taken]) if continued else sending.taken)
            found.append((message.header.first, float(message.tree[0]), float(message.tree[-1])))
        return found


def messages(count: int) -> list[tuple[int, float, float]]:
    return [(k, float(k), float(k)) for k in range(count)]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_memory_is_used_again_once_a_peer_has_told_that_it_took_the_message(size: int) -> None:
    """Of a message in two sends only once the second is over as well."""
    sender = Sender()
    for k in range(12):
        sender.send(size)
        sender.lane.credit(max(k - 1, 0))
    assert len(set(sender.memory())) < 6
    assert sender.received() == messages(12)


def test_memory_waits_for_a_thread_that_waits_for_the_send() -> None:
    sender = Sender()
    sender.send()
    sender.send()  # the first one without the description of its structure
    held = sender.link.sent[1]
    held.goes_on.clear()
    sender.lane.hand_over()
    assert held.waited.wait(20.0)
    sender.send()
    held.goes_on.set()
    assert sender.received() == messages(3)
    assert len(set(sender.memory())) == 3


def test_memory_of_a_send_that_has_stalled_is_never_used_again() -> None:
    sender = Sender()
    sender.lane.patience = timedelta(seconds=1)
    tickets = [sender.send(), sender.send()]
    sender.link.sent[1].stalls = True
    sender.lane.credit(2)
    assert tickets[0].error is None
    assert isinstance(tickets[1].error, TransportError)
    sender.send()
    assert len(set(sender.memory())) == 3


@pytest.mark.parametrize("seed", range(10))
def test_memory_over_random_sizes_credits_and_threads(seed: int) -> None:
    sender, draw = Sender(), random.Random(seed)
    for _ in range(40):
        sender.send(draw.choice([SMALL, SMALL, SMALL, LARGE, 2 * LARGE]))
        if draw.random() < 0.5:
            sender.lane.credit(draw.randint(0, sender.count))
        if draw.random() < 0.1:
            sender.lane.hand_over()
    assert sender.received() == messages(40)
