"""Tensors on communicators of their own, headers over gloo: the transport for CUDA and NCCL.

With one communicator for everything, NCCL would merge all lanes into one queue. So every lane gets a communicator of
its two ranks, and the lanes of the machine model are lanes in fact. What describes a parcel travels through gloo as
always; the thread that waits for it then posts the receives of the tensors, on a stream of its own, and hands the
consumer an event to wait for.

Groups of gloo run the same code on the CPU; that is how it is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.gloo import GlooLane, LaneTransport
from penstock.comm.p2p.message import Codec, Parcel, as_it_lies
from penstock.comm.p2p.transport import Channel
from penstock.errors import CapabilityError
from penstock.schedule.machine.instructions import LaneKey

_TAG = 1  # tensors of a lane have a group of their own, so one tag serves them all


LaneGroups = Mapping[LaneKey, dist.ProcessGroup]


def lane_groups(lanes: Sequence[LaneKey], control: dist.ProcessGroup, backend: str, width: int = 1) -> list[LaneGroups]:
    """Per parallel pipeline a group for each lane, made once and used by all spans; all ranks of the job call this.

    Args:
        lanes: all lanes of the schedule, in one order on all ranks.
        control: a gloo group whose ranks are those of the pipelines.
        backend: "nccl"; "gloo" in tests.
        width: the number of pipelines.

    Raises:
        CapabilityError: the pipelines are only a part of the job, so that not all ranks would take part.
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
        super().__init__(
            {
                lane: _SplitLane(lane, rank == lane.source, window, control, group, device, first, channel)
                for lane, group in groups.items()
                if rank in lane[:2]
            }
        )


class _SplitLane(GlooLane):
    """A lane that sends the description of a parcel through gloo and its tensors through another group."""

    def __init__(
        self,
        lane: LaneKey,
        sends: bool,
        window: int,
        control: dist.ProcessGroup,
        tensors: Any,
        device: torch.device,
        first: int,
        channel: Channel,
    ) -> None:
        super().__init__(lane, sends, window, control, first, channel)
        self.codec = Codec(self.where, inline=False)
        self._tensors, self._device = tensors, device
        self._far = dist.get_group_rank(tensors, dist.get_global_rank(control, self._peer))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, parcel: Parcel) -> Ticket:
        """Post the description and every tensor."""
        ticket = super().send(parcel)
        leaves = [as_it_lies(leaf).contiguous() for leaf in pytree.tree_leaves(parcel.tree) if isinstance(leaf, Tensor)]
        works = [dist.isend(t, group=self._tensors, tag=_TAG, group_dst=self._far) for t in leaves if t.numel()]
        kept = Ticket(self.lane)

        def finish() -> None:
            ticket.check(self.where)  # the description is done: the thread works in order
            with torch.cuda.stream(self._stream):  # not on the stream that computes
                for work in works:
                    assert work is not None
                    work.wait()
            if self._stream is not None:
                self._stream.synchronize()
            leaves.clear()  # they live until the peer has them

        self.background.later([kept], finish)
        return kept

    def decode(self, block: Tensor) -> Parcel:
        """Read the description, then receive every tensor."""
        received: list[Tensor] = []

        def fetch(dtype: torch.dtype, shape: list[int]) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            if tensor.numel():
                work = dist.irecv(tensor, group=self._tensors, tag=_TAG, group_src=self._far)
                assert work is not None
                work.wait()  # on CUDA only the stream waits
            received.append(tensor)
            return tensor

        if self._stream is None:
            return self.codec.decode(block, fetch)
        with torch.cuda.stream(self._stream):
            parcel = self.codec.decode(block, fetch)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        parcel.on_use = _after(arrived, received)
        return parcel


def _after(event: torch.cuda.Event, tensors: list[Tensor]) -> Callable[[], None]:
    """Make the consumer's stream wait for an event and keep the tensors for it."""

    def wait() -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)

    return wait
