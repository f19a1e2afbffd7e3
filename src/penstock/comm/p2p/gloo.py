"""Transport between processes over gloo (`torch.distributed`); the NCCL transport builds on it.

A message is sent as one tensor of bytes. The receiver posts a block at least as large as the largest message of the
lane that it has certainly consumed by then (all but the last `window`); the sender knows those sizes, too. Of a larger
message, the header goes into that block and the rest follows as a second send. So messages of constant shape cost one
send each, and shapes may change at any time.

Gloo's handles cannot be polled, so one thread per lane waits for them in order and records when they complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.background import Background
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.message import HEADER_BYTES, Codec, TensorMessage, size_and_continued, split
from penstock.comm.p2p.transport import Channel
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey

_FIRST_CAPACITY = 4096
_TAGS = {  # the next tag after each is that of the second send
    (channel, payload): Tag.LANES + 2 * (len(Payload) * channel + i)
    for channel in Channel
    for i, payload in enumerate(Payload)
}


class LaneTransport:
    """A transport that gives every message to an object for its lane.

    Args:
        lanes: the lanes that begin or end at this rank.
    """

    def __init__(self, lanes: Mapping[LaneKey, GlooLane]) -> None:
        self._lanes = lanes

    def receive(self, lane: LaneKey) -> Ticket:
        """Post a RECV on a lane."""
        return self._lanes[lane].receive()

    def send(self, lane: LaneKey, message: TensorMessage) -> Ticket:
        """Post a SEND on a lane."""
        return self._lanes[lane].send(message)

    def close(self) -> None:
        """Let the threads end after everything that has been posted."""
        for lane in self._lanes.values():
            lane.background.close()


class GlooTransport(LaneTransport):
    """Transport of one rank over a gloo process group.

    Args:
        rank: this rank in its pipeline.
        lanes: all lanes of the schedule; those of this rank get a thread each.
        window: the most outstanding messages per lane.
        group: the process group; None for the default group.
        first: group rank of the pipeline's rank 0; the other ranks follow.
        channel: training or evaluation.
    """

    def __init__(
        self,
        rank: int,
        lanes: tuple[LaneKey, ...],
        window: int,
        group: dist.ProcessGroup | None = None,
        first: int = 0,
        channel: Channel = Channel.TRAINING,
    ) -> None:
        here = [lane for lane in lanes if rank in lane[:2]]
        super().__init__({lane: GlooLane(lane, rank == lane.source, window, group, first, channel) for lane in here})


class GlooLane:
    """One end of a lane: the sending one or the receiving one."""

    def __init__(
        self,
        lane: LaneKey,
        sends: bool,
        window: int,
        group: dist.ProcessGroup | None,
        first: int = 0,
        channel: Channel = Channel.TRAINING,
    ) -> None:
        self._window = window
        self.lane = lane._replace(source=first + lane.source, target=first + lane.target)  # for error messages
        self.where = str(self.lane)
        self.codec = Codec(self.where)
        self._peer = first + (lane.target if sends else lane.source)
        tag = _TAGS[channel, lane.payload]
        self._messages, self._rests = TaggedGroup(group, tag), TaggedGroup(group, tag + 1)
        self._largest = _FIRST_CAPACITY  # bytes of the largest message that the receiver has certainly consumed
        self._recent: deque[int] = deque()  # bytes of the last messages sent, which it may not have consumed
        self.background = Background(self.where)

    def send(self, message: TensorMessage) -> Ticket:
        """Post a SEND of a message."""
        ticket, block = Ticket(self.lane), self.codec.encode(message)
        if len(self._recent) >= self._window:
            self._largest = max(self._largest, self._recent.popleft())
        self._recent.append(block.numel())
        whole = block.numel() <= self._largest
        parts = [block] if whole else split(block)
        try:
            works = [
                way.send(part, self._peer) for way, part in zip((self._messages, self._rests), parts, strict=False)
            ]
        except RuntimeError as error:  # the peer is gone; reported where the ticket is waited for
            ticket.complete(error=error)
            return ticket

        def finish() -> None:
            self._messages.finish(works)
            del parts[:]  # the blocks must live until the peer has them

        self.background.later([ticket], finish)
        return ticket

    def receive(self) -> Ticket:
        """Post a RECV for the next message of the lane."""
        ticket, block = Ticket(self.lane, nbytes=self._largest), torch.empty(self._largest, dtype=torch.uint8)
        try:
            work = self._messages.receive(block, self._peer)
        except RuntimeError as error:
            ticket.complete(error=error)
            return ticket

        def finish() -> TensorMessage:
            self._messages.finish([work])
            return self.decode(self._whole(block))

        self.background.later([ticket], finish)
        return ticket

    def decode(self, block: Tensor) -> TensorMessage:
        """Decode a complete block."""
        return self.codec.decode(block)

    def _whole(self, block: Tensor) -> Tensor:
        """Return the complete message that begins with `block`, receiving the rest if there is one."""
        size, continued = size_and_continued(block)
        self._largest = max(self._largest, size)
        if continued:
            whole = torch.empty(size, dtype=torch.uint8)
            whole[:HEADER_BYTES] = block[:HEADER_BYTES]
            self._rests.finish([self._rests.receive(whole[HEADER_BYTES:], self._peer)])
            return whole
        # Do not keep a block alive if the message uses less than half of it.
        return block[:size].clone() if size < block.numel() // 2 else block
