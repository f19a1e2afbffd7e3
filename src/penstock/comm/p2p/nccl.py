"""Transport for CUDA: tensors over one NCCL communicator per lane, headers over gloo.

With a single communicator NCCL would serialize all lanes in one queue. So every lane gets a communicator of its two
ranks, as in the machine model. The header and the description of a message travel through gloo; the thread that waits
for them then posts the receives of the tensors on a stream of its own, and gives the consumer an event to wait for.

With gloo groups the same code runs on the CPU, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.core.tagged_group import TaggedGroup, Work
from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.gloo import LaneTransport
from penstock.comm.p2p.gloo_lanes import ReceiveLane, SendLane
from penstock.comm.p2p.message import Codec, TensorMessage, as_it_lies
from penstock.comm.p2p.transport import Channel
from penstock.errors import CapabilityError
from penstock.schedule.machine.instructions import LaneKey

_TAG = 1  # every lane's tensors have a group of their own, so one tag will do


LaneGroups = Mapping[LaneKey, dist.ProcessGroup]


def lane_groups(lanes: Sequence[LaneKey], control: dist.ProcessGroup, backend: str, width: int = 1) -> list[LaneGroups]:
    """Make a process group for each lane of each parallel pipeline; all ranks of the job must call this together.

    Args:
        lanes: all lanes of the schedule, in one order on all ranks.
        control: a gloo group of the pipelines' ranks.
        backend: "nccl"; "gloo" in tests.
        width: the number of pipelines.

    Raises:
        CapabilityError: the pipelines do not span the whole job, so that some of its ranks would not take part.
    """
    here, everywhere = dist.get_world_size(control), dist.get_world_size()
    if here != everywhere:
        # torch's new_group(use_local_synchronization=True) names groups by how many a rank has: lanes of a chain hang.
        raise CapabilityError(f"over NCCL a pipeline must hold all {everywhere} ranks of the job; its group has {here}")
    depth = here // width
    return [
        {
            lane: dist.new_group([dist.get_global_rank(control, first + r) for r in lane[:2]], backend=backend)
            for lane in lanes
        }
        for first in range(0, here, depth)
    ]


class NcclTransport(LaneTransport):
    """Lanes of one rank whose tensors travel on groups of their own.

    Args:
        rank: this rank in the pipeline.
        groups: of the lanes, as `lane_groups` made them.
        window: outstanding messages per lane.
        control: a gloo group.
        device: where received tensors go.
        first: rank in the gloo group of the pipeline's rank 0; the others follow.
        channel: which lanes.
    """

    def __init__(
        self,
        rank: int,
        groups: LaneGroups,
        window: int,
        control: dist.ProcessGroup,
        device: torch.device,
        first: int = 0,
        channel: Channel = Channel.TRAINING,
    ) -> None:
        settings = window, control, first, channel
        super().__init__(
            {lane: _SplitSendLane(lane, g, device, *settings) for lane, g in groups.items() if lane.source == rank},
            {lane: _SplitReceiveLane(lane, g, device, *settings) for lane, g in groups.items() if lane.target == rank},
        )


class _Wires:
    """What the tensors of a lane travel on.

    Args:
        group: of the two ranks.
        peer: the other one, in the job.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._tensors, self._far = TaggedGroup(group, _TAG, direct=True), dist.get_group_rank(group, peer)
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, tensor: Tensor) -> Work | None:
        """Start to send a tensor."""
        return self._tensors.send(tensor, self._far)

    def finish(self, works: Sequence[Work | None]) -> None:
        """Wait until tensors have been sent, not on the stream that computes."""
        with torch.cuda.stream(self.stream):
            self._tensors.finish(works)
        if self.stream is not None:
            self.stream.synchronize()

    def receive(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        """Receive a tensor; on CUDA only the stream waits."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._tensors.finish([self._tensors.receive(tensor, self._far)])
        return tensor


class _SplitSendLane(SendLane):
    """Sends the description of a message through gloo and its tensors through another process group."""

    def __init__(
        self, lane: LaneKey, tensors: dist.ProcessGroup, device: torch.device, window: int,
        control: dist.ProcessGroup, first: int, channel: Channel,
    ) -> None:  # fmt: skip
        super().__init__(lane, window, control, first, channel)
        self.codec = Codec(str(self.lane), inline=False)
        self._wires = _Wires(tensors, dist.get_global_rank(control, self._peer), device)

    def send(self, message: TensorMessage) -> Ticket:
        """Post the description and every tensor; the ticket is done when all have been sent."""
        ticket = super().send(message)
        self.hand_over()
        leaves = [
            as_it_lies(leaf).contiguous() for leaf in pytree.tree_leaves(message.tree) if isinstance(leaf, Tensor)
        ]
        works = [self._wires.send(leaf) for leaf in leaves]
        kept = Ticket(self.lane)

        def finish() -> None:
            ticket.check(str(self.lane))  # the description has been sent: the thread works in order
            self._wires.finish(works)
            leaves.clear()  # they must live until the peer has them

        self.background.later([kept], finish)
        return kept


class _SplitReceiveLane(ReceiveLane):
    """Receives the description of a message through gloo and its tensors through another process group."""

    def __init__(
        self, lane: LaneKey, tensors: dist.ProcessGroup, device: torch.device, window: int,
        control: dist.ProcessGroup, first: int, channel: Channel,
    ) -> None:  # fmt: skip
        super().__init__(lane, window, control, first, channel)
        self.codec = Codec(str(self.lane), inline=False)
        self._wires = _Wires(tensors, dist.get_global_rank(control, self._peer), device)

    def receive(self) -> Ticket:
        """Post a RECV; the thread waits for the description and then posts those of the tensors."""
        ticket = super().receive()
        self.hand_over()
        return ticket

    def decode(self, block: Tensor) -> TensorMessage:
        """Decode the description, then receive every tensor."""
        stream, received = self._wires.stream, list[Tensor]()

        def fetch(dtype: torch.dtype, shape: list[int]) -> Tensor:
            received.append(self._wires.receive(dtype, shape))
            return received[-1]

        if stream is None:
            return self.codec.decode(block, fetch)
        with torch.cuda.stream(stream):
            message = self.codec.decode(block, fetch)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        message.on_use = _after(arrived, received)
        return message


def _after(event: torch.cuda.Event, tensors: list[Tensor]) -> Callable[[], None]:
    """Return a function that makes the consumer's stream wait for an event and keeps the tensors for that stream."""

    def wait() -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)

    return wait
