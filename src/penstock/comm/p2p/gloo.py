"""Ranks in processes of their own, on `torch.distributed` with gloo; `nccl.py` builds on it.

A parcel is one message. The receiver posts a block at least as large as any parcel of the lane that it has surely
consumed by then (all but the last `window`); the sender knows those sizes, too. A larger parcel sends its header into
that block and the rest as a second message. So constant shapes cost one message, and shapes may change at any time.

A gloo handle cannot be asked whether it is done, only be waited for, so one thread per lane waits, in order, and notes
the time of arrival. Every handle is kept until it completes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.background import Background
from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.message import HEADER_BYTES, Codec, Parcel, size_and_continued, split
from penstock.comm.p2p.transport import Channel
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey

_FIRST_CAPACITY = 4096
_TAGS = {  # the odd tags carry second messages
    (channel, payload): 16 + 2 * (len(Payload) * channel + i)
    for channel in Channel
    for i, payload in enumerate(Payload)
}


class LaneTransport:
    """Hands every message to its lane.

    Args:
        lanes: those that begin or end at this rank.
    """

    def __init__(self, lanes: Mapping[LaneKey, GlooLane]) -> None:
        self._lanes = lanes

    def receive(self, lane: LaneKey) -> Ticket:
        """Post a RECV."""
        return self._lanes[lane].receive()

    def send(self, lane: LaneKey, parcel: Parcel) -> Ticket:
        """Post a SEND."""
        return self._lanes[lane].send(parcel)

    def close(self) -> None:
        """Stop the waiting threads once all they were given is done."""
        for lane in self._lanes.values():
            lane.background.close()


class GlooTransport(LaneTransport):
    """Lanes of one rank on a gloo process group.

    Args:
        rank: this rank in its pipeline.
        lanes: all lanes of the schedule; those of this rank get a thread each.
        window: outstanding messages per lane.
        group: the process group; None for the default group.
        first: group rank of the pipeline's rank 0; the others follow.
        channel: which lanes.
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
    """One end of a lane."""

    def __init__(
        self,
        lane: LaneKey,
        sends: bool,
        window: int,
        group: dist.ProcessGroup | None,
        first: int = 0,
        channel: Channel = Channel.TRAINING,
    ) -> None:
        self._group, self._window = group, window
        self.lane = lane._replace(source=first + lane.source, target=first + lane.target)  # for messages
        self.where = str(self.lane)
        self.codec = Codec(self.where)
        self._peer = first + (lane.target if sends else lane.source)
        self._tag = _TAGS[channel, lane.payload]
        self._largest = _FIRST_CAPACITY  # of the parcels that the receiver has surely consumed
        self._recent: deque[int] = deque()  # sizes of the last parcels sent, which it may not have
        self.background = Background(self.where)

    def send(self, parcel: Parcel) -> Ticket:
        """Post a SEND of a parcel."""
        ticket, block = Ticket(self.lane), self.codec.encode(parcel)
        if len(self._recent) >= self._window:
            self._largest = max(self._largest, self._recent.popleft())
        self._recent.append(block.numel())
        whole = block.numel() <= self._largest
        parts = [block] if whole else split(block)
        try:
            works = [self._isend(part, self._tag + i) for i, part in enumerate(parts)]
        except RuntimeError as error:  # the peer is gone; who waits for the ticket says what for
            ticket.complete(error=error)
            return ticket

        def finish() -> None:
            for work in works:
                work.wait()
            del parts[:]  # the blocks live until the peer has them

        self.background.later([ticket], finish)
        return ticket

    def receive(self) -> Ticket:
        """Post a RECV for the next parcel of the lane."""
        ticket, block = Ticket(self.lane, nbytes=self._largest), torch.empty(self._largest, dtype=torch.uint8)
        try:
            work = self._irecv(block, self._tag)
        except RuntimeError as error:
            ticket.complete(error=error)
            return ticket

        def finish() -> Parcel:
            work.wait()
            return self.decode(self._whole(block))

        self.background.later([ticket], finish)
        return ticket

    def decode(self, block: Tensor) -> Parcel:
        """The parcel in a complete block."""
        return self.codec.decode(block)

    def _whole(self, block: Tensor) -> Tensor:
        """The complete parcel whose beginning is in `block`."""
        size, continued = size_and_continued(block)
        self._largest = max(self._largest, size)
        if continued:
            whole = torch.empty(size, dtype=torch.uint8)
            whole[:HEADER_BYTES] = block[:HEADER_BYTES]
            self._irecv(whole[HEADER_BYTES:], self._tag + 1).wait()
            return whole
        # Do not keep a block alive of which the parcel uses less than half.
        return block[:size].clone() if size < block.numel() // 2 else block

    def _isend(self, tensor: Tensor, tag: int) -> Any:
        return dist.isend(tensor, group=self._group, tag=tag, group_dst=self._peer)

    def _irecv(self, tensor: Tensor, tag: int) -> Any:
        return dist.irecv(tensor, group=self._group, tag=tag, group_src=self._peer)
