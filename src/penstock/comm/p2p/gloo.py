"""Transport between processes over gloo (`torch.distributed`); the NCCL transport builds on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.comm.core.transfer_priority import TransferPriority
from penstock.comm.message.wire_header import CREDITED
from penstock.comm.p2p.gloo_send_receive import ReceiveLane, SendLane
from penstock.comm.p2p.transport import Channel
from penstock.schedule.machine.instructions import LaneKey


class LaneTransport:
    """A transport with an object for either end of every lane.

    Args:
        sends: the lanes that begin at this rank.
        receives: the lanes that end at this rank.
        patience: how long the rank waits for the rest of a message; the time-out of the group if None.
    """

    def __init__(
        self,
        sends: Mapping[LaneKey, SendLane],
        receives: Mapping[LaneKey, ReceiveLane],
        patience: timedelta | None = None,
    ) -> None:
        self._sends, self._receives = sends, receives
        for lane in (*sends.values(), *receives.values()):
            lane.patience = patience

    def sender(self, lane: LaneKey) -> SendLane:
        """Return the end of a lane that begins at this rank."""
        return self._sends[lane]

    def receiver(self, lane: LaneKey) -> ReceiveLane:
        """Return the end of a lane that ends at this rank."""
        return self._receives[lane]

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
        ranks: group rank of each of the pipeline's; the same numbers if None.
        channel: training or evaluation.
        device: where received tensors go; the CPU if None.
        priority: of the rank, which is told of messages.
        patience: how long the rank waits for the rest of a message; the time-out of the group if None.
    """

    def __init__(
        self,
        rank: int,
        lanes: tuple[LaneKey, ...],
        window: int,
        group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
        channel: Channel = Channel.TRAINING,
        device: torch.device | None = None,
        priority: TransferPriority | None = None,
        patience: timedelta | None = None,
    ) -> None:
        settings = window, group, ranks, channel
        sends = {lane: SendLane(lane, *settings) for lane in lanes if lane.source == rank}
        receives = {lane: ReceiveLane(lane, *settings, device) for lane in lanes if lane.target == rank}
        super().__init__(sends, receives, patience)
        for lane, sending in sends.items():
            sending.priority = priority or sending.priority
            sending.back = [receives.get(LaneKey(lane.target, rank, payload)) for payload in CREDITED]
        for lane, receiving in receives.items():
            back = (sends.get(LaneKey(rank, lane.source, payload)) for payload in CREDITED)
            receiving.back = [(place, sending) for place, sending in enumerate(back) if sending is not None]
