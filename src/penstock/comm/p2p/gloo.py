"""Transport between processes over gloo (`torch.distributed`); the NCCL transport builds on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.gloo_lanes import ReceiveLane, SendLane
from penstock.comm.p2p.message import CREDIT_RANGE, CREDITED, Credits, TensorMessage
from penstock.comm.p2p.transport import Channel
from penstock.schedule.machine.instructions import LaneKey


class LaneTransport:
    """A transport that gives every message to an object for its lane.

    Args:
        sends: the lanes that begin at this rank.
        receives: the lanes that end at this rank.
    """

    def __init__(self, sends: Mapping[LaneKey, SendLane], receives: Mapping[LaneKey, ReceiveLane]) -> None:
        self._sends, self._receives = sends, receives

    def receive(self, lane: LaneKey) -> Ticket:
        """Post a RECV on a lane."""
        return self._receives[lane].receive()

    def send(self, lane: LaneKey, message: TensorMessage) -> Ticket:
        """Post a SEND on a lane."""
        return self._sends[lane].send(message)

    def close(self) -> None:
        """Let the threads end after everything that has been posted."""
        for lane in (*self._sends.values(), *self._receives.values()):
            lane.close()


class GlooTransport(LaneTransport):
    """Transport of one rank over a gloo process group.

    Args:
        rank: this rank in its pipeline.
        lanes: all lanes of the schedule.
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
        settings = window, group, first, channel
        sends = {lane: SendLane(lane, *settings) for lane in lanes if lane.source == rank}
        receives = {lane: ReceiveLane(lane, *settings) for lane in lanes if lane.target == rank}
        super().__init__(sends, receives)
        self._credited = {
            lane: [receives.get(LaneKey(lane.target, rank, payload)) for payload in CREDITED] for lane in sends
        }
        for lane, receiving in receives.items():
            back = (sends.get(LaneKey(rank, lane.source, payload)) for payload in CREDITED)
            receiving.back = [(place, sending) for place, sending in enumerate(back) if sending is not None]

    def send(self, lane: LaneKey, message: TensorMessage) -> Ticket:
        """Post a SEND on a lane; the message tells its receiver which of its own SENDs have been taken."""
        return self._sends[lane].send(message, self._credits(lane))

    def _credits(self, lane: LaneKey) -> Credits:
        return [0 if receiving is None else receiving.posted % CREDIT_RANGE for receiving in self._credited[lane]]
