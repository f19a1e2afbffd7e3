"""A message of which only the beginning has come holds nobody up who does not need it."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from penstock.comm.p2p.codec import HEADER_BYTES, Codec, split
from penstock.comm.p2p.gloo import ReceiveLane
from penstock.comm.p2p.tensor_message import Header, TensorMessage
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey

LANE = LaneKey(0, 1, Payload.ACTIVATION)


class Receiving:
    """A posted receive: the block that it fills, and how often somebody has waited for it."""

    def __init__(self, block: Tensor) -> None:
        self.block, self.waits = block, 0

    def wait(self) -> None:
        self.waits += 1


class Link:
    """Instead of a group: what is received comes when the test says so."""

    def __init__(self) -> None:
        self.posted: list[Receiving] = []

    def receive(self, tensor: Tensor, rank: int) -> Receiving:
        self.posted.append(Receiving(tensor))
        return self.posted[-1]

    def finish(self, works: list[Receiving], timeout: timedelta | None = None) -> None:
        for work in works:
            work.wait()


class Wire:
    """A lane's receiving end, and the messages of its sender."""

    def __init__(self) -> None:
        self.lane, self.link, self.codec = ReceiveLane(LANE, 2, None), Link(), Codec("a lane")
        self.lane._messages = self.link

    def message(self, number: int, size: int = 100) -> Tensor:
        tensor = torch.full((size,), float(number))
        return self.codec.encode(TensorMessage(Header(0, number, True), tensor, (False,)))

    def warm_up(self, size: int = 100) -> None:
        """Two whole messages: the second is as long as all that follow."""
        for number in range(2):
            ticket = self.lane.receive()
            self.deliver(number, self.message(number, size))
            assert ticket.done
            assert float(ticket.result.tree[0]) == number

    def deliver(self, place: int, block: Tensor, start: int = 0, end: int | None = None) -> None:
        part = block[start:end]
        self.link.posted[place].block[start : start + part.numel()] = part


def test_nobody_waits_for_a_message_that_is_under_way() -> None:
    wire = Wire()
    wire.warm_up()
    needed, next_ = wire.lane.receive(), wire.lane.receive()
    first, second = wire.message(2), wire.message(3)
    wire.deliver(2, first)
    wire.deliver(3, second, 0, second.numel() - 1)
    assert needed.done
    assert float(needed.result.tree[0]) == 2
    assert not next_.done
    assert wire.link.posted[3].waits == 0
    wire.deliver(3, second, second.numel() - 1)
    assert next_.done
    assert float(next_.result.tree[-1]) == 3


def test_a_message_of_another_length_is_waited_for() -> None:
    """Where its end lies cannot be known beforehand, so it is taken once its header has come."""
    wire = Wire()
    wire.warm_up()
    ticket, other = wire.lane.receive(), wire.message(2, 50)
    wire.deliver(2, other)
    assert ticket.done
    assert wire.link.posted[2].waits == 1


def test_a_message_in_two_sends_is_taken_once_its_header_has_come() -> None:
    """The rest is not even posted before."""
    wire = Wire()
    wire.warm_up(900)
    ticket, block = wire.lane.receive(), wire.message(2, 900)
    head, rest = split(block)
    wire.deliver(2, head)

    class Rest(Link):
        def receive(self, tensor: Tensor, rank: int) -> Receiving:
            tensor.copy_(rest)
            return super().receive(tensor, rank)

    wire.lane._rests = Rest()
    assert ticket.done
    assert float(ticket.result.tree[-1]) == 2
    assert wire.link.posted[2].block.numel() > HEADER_BYTES
