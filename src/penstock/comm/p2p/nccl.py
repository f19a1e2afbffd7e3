"""Transport for CUDA: tensors over one NCCL communicator per lane, headers over gloo.

Every lane has a communicator of its two ranks, since NCCL serializes what travels on one. Still it may carry out what
a device issues one after another. So only the thread that computes issues anything, at its place in the program, and
the places give all ranks one order of all messages (`penstock.schedule.machine.issue_order`). A receive is posted
before it is known what comes: with the structure of the message that has certainly been consumed by then, all but the
last `window`, which the sender knows, too. A message of another structure travels over gloo as a whole.

With gloo groups the same code runs on the CPU, which is how it is tested without a GPU.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.core.devices import on_device
from penstock.comm.core.tagged_group import TaggedGroup, Work
from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.codec import Codec, Fetch, described_tensors
from penstock.comm.p2p.gloo import LaneTransport, ReceiveLane, SendLane
from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.comm.p2p.transport import Channel
from penstock.comm.p2p.trees import as_it_lies
from penstock.errors import CapabilityError
from penstock.schedule.machine.instructions import LaneKey

_WARNS = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"  # torch reads it when it makes a group
_TAG = 1  # every lane's tensors have a group of their own, so one tag will do


LaneGroups = Mapping[LaneKey, dist.ProcessGroup]


def lane_groups(
    lanes: Sequence[LaneKey],
    control: dist.ProcessGroup,
    backend: str,
    pipelines: Sequence[Sequence[int]],
    device: torch.device | None = None,
) -> list[LaneGroups]:
    """Make a process group for each lane of each parallel pipeline; all ranks of the job must call this together.

    Args:
        lanes: all lanes of the schedule, in one order on all ranks.
        control: a gloo group of the pipelines' ranks.
        backend: "nccl"; "gloo" in tests.
        pipelines: the rank in that group of each of their ranks.
        device: to connect at once; at the first message if None. NCCL warns of that, and makes a second communicator.

    Raises:
        CapabilityError: the pipelines do not span the whole job, so that some of its ranks would not take part.
    """
    here, everywhere = dist.get_world_size(control), dist.get_world_size()
    if here != everywhere:
        # torch's new_group(use_local_synchronization=True) names groups by how many a rank has: lanes of a chain hang.
        raise CapabilityError(f"over NCCL a pipeline must hold all {everywhere} ranks of the job; its group has {here}")
    with _one_lane_per_group():
        return _new_groups(lanes, control, backend, pipelines, device)


def _new_groups(
    lanes: Sequence[LaneKey],
    control: dist.ProcessGroup,
    backend: str,
    pipelines: Sequence[Sequence[int]],
    device: torch.device | None,
) -> list[LaneGroups]:
    return [
        {
            lane: dist.new_group(
                [dist.get_global_rank(control, ranks[r]) for r in lane[:2]], backend=backend, device_id=device
            )
            for lane in lanes
        }
        for ranks in pipelines
    ]


@contextmanager
def _one_lane_per_group() -> Iterator[None]:
    """Let torch not warn that what travels on a group is serialized: each has one lane, whose messages are in order."""
    before = os.environ.get(_WARNS)
    os.environ[_WARNS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_WARNS)
        if before is not None:
            os.environ[_WARNS] = before


class NcclTransport(LaneTransport):
    """Lanes of one rank whose tensors travel on groups of their own.

    Args:
        rank: this rank in the pipeline.
        groups: of the lanes, as `lane_groups` made them.
        window: outstanding messages per lane.
        control: a gloo group.
        device: where received tensors go.
        ranks: rank in the gloo group of each of the pipeline's; the same numbers if None.
        channel: which lanes.
        patience: how long the rank waits for the rest of a message on the gloo group; the time-out of that if None.
    """

    def __init__(
        self,
        rank: int,
        groups: LaneGroups,
        window: int,
        control: dist.ProcessGroup,
        device: torch.device,
        ranks: Sequence[int] | None = None,
        channel: Channel = Channel.TRAINING,
        patience: timedelta | None = None,
    ) -> None:
        settings = window, control, ranks, channel
        super().__init__(
            {lane: _SplitSendLane(lane, g, device, *settings) for lane, g in groups.items() if lane.source == rank},
            {lane: _SplitReceiveLane(lane, g, device, *settings) for lane, g in groups.items() if lane.target == rank},
            patience,
        )


class Wires:
    """What the tensors of a lane travel on; only the rank's own thread posts anything here.

    Args:
        lane: whose tensors.
        group: of the two ranks.
        peer: the other one, in the job.
        device: of the tensors.
    """

    def __init__(self, lane: LaneKey, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._tensors, self._far = TaggedGroup(group, _TAG, direct=True), dist.get_group_rank(group, peer)
        self.lane, self.device = lane, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, tensor: Tensor) -> Work | None:
        """Start to send a tensor."""
        return self._tensors.send(tensor, self._far)

    def receive(self, dtype: torch.dtype, shape: list[int]) -> tuple[Tensor, Work | None]:
        """Start to receive a tensor, which waits for nothing that is computed."""
        with torch.cuda.stream(self.stream):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            return tensor, self._tensors.receive(tensor, self._far)

    def finish(self, works: Sequence[Work | None]) -> None:
        """Wait until tensors have been sent or received; on CUDA only the current stream waits."""
        self._tensors.finish(works)

    def drain(self, works: Sequence[Work | None]) -> None:
        """Wait until tensors have been sent, not on the stream that computes."""
        with torch.cuda.stream(self.stream):
            self._tensors.finish(works)
        if self.stream is not None:
            self.stream.synchronize()


class _Kept(NamedTuple):
    """Tensors of a message that must live until the peer has them."""

    ticket: Ticket
    tensors: list[Tensor]
    works: list[Work | None]


class _SplitSendLane(SendLane):
    """Sends the description of a message through gloo, and its tensors through another group if their receives stand.

    Those stand of the structure that the message one window earlier had. Of another structure, or if there was no such
    message, the tensors travel with the description; what has been posted is then filled with anything.
    """

    def __init__(
        self, lane: LaneKey, tensors: dist.ProcessGroup, device: torch.device, window: int,
        control: dist.ProcessGroup, ranks: Sequence[int] | None, channel: Channel,
    ) -> None:  # fmt: skip
        super().__init__(lane, window, control, ranks, channel)
        self.codec = Codec(str(self.lane), self._stands)
        self._wires = Wires(lane, tensors, dist.get_global_rank(control, self._peer), device)
        self._descriptions: deque[bytes] = deque()  # of the last messages, as many as the window
        self._posted, self._apart = b"", False
        self._sending: deque[_Kept] = deque()

    def _stands(self, description: bytes) -> bool:
        """Say whether the receives that the peer has posted are for this structure."""
        full = len(self._descriptions) >= self._window
        self._posted = self._descriptions.popleft() if full else b""
        self._descriptions.append(description)
        self._apart = self._posted == description
        return self._apart

    def send(self, message: TensorMessage) -> Ticket:
        """Post the description, and what the posted receives of the peer take."""
        self._release()
        ticket = super().send(message)
        tensors: list[Tensor] = []
        if self._apart:
            leaves = [leaf for leaf in pytree.tree_leaves(message.tree) if isinstance(leaf, Tensor)]
            tensors = [as_it_lies(leaf).contiguous() for leaf in leaves]
        elif self._posted:
            wanted = described_tensors(self._posted, self.codec.where)
            tensors = [torch.empty(shape, dtype=dtype, device=self._wires.device) for dtype, shape in wanted]
        try:
            works = [self._wires.send(tensor) for tensor in tensors]
        except RuntimeError as error:  # the peer is gone
            broken = Ticket(self.lane)
            broken.complete(error=error)
            return broken
        self._sending.append(_Kept(ticket, tensors, works))
        return ticket

    def _release(self) -> None:
        """Forget tensors that the peer has consumed: all but those of the last `window` before a RECV that it posts."""
        on_device = self._wires.device.type == "cuda"
        while len(self._sending) > self._window and self._sending[self._window].ticket.done:
            works = [work for work in self._sending[0].works if work is not None]
            if on_device and not all(isinstance(work, dist.Work) and work.is_completed() for work in works):
                return
            self._sending.popleft()
            if not on_device:
                self._wires.finish(works)

    def close(self) -> None:
        """Let the thread end after everything that has been posted."""
        left = [work for sending in self._sending for work in sending.works]
        self.background.later([], partial(self._wires.drain, left))
        super().close()


class _Posted(NamedTuple):
    """The receives of a message's tensors that stand, and for which structure; none where that is empty."""

    description: bytes
    tensors: list[Tensor]
    works: list[Work | None]


class _SplitReceiveLane(ReceiveLane):
    """Receives the description of a message through gloo, and its tensors as `_SplitSendLane` sends them."""

    def __init__(
        self, lane: LaneKey, tensors: dist.ProcessGroup, device: torch.device, window: int,
        control: dist.ProcessGroup, ranks: Sequence[int] | None, channel: Channel,
    ) -> None:  # fmt: skip
        super().__init__(lane, window, control, ranks, channel, device)
        self._wires = Wires(lane, tensors, dist.get_global_rank(control, self._peer), device)
        self._descriptions: deque[bytes] = deque()  # of what has come, without those that RECVs have been posted for
        self._posted: deque[_Posted] = deque()

    def receive(self) -> Ticket:
        """Post a RECV, and receives of tensors with the structure of the message one window earlier."""
        number = self.posted
        ticket = super().receive()
        if ticket.error is not None:
            return ticket
        description = self._descriptions.popleft() if number >= self._window else b""
        wanted = described_tensors(description, self.codec.where) if description else []
        try:
            found = [self._wires.receive(*each) for each in wanted]
        except RuntimeError as error:  # the peer is gone
            ticket.complete(error=error)
            return ticket
        self._posted.append(_Posted(description, [tensor for tensor, _ in found], [work for _, work in found]))
        return ticket

    def decode(self, block: Tensor, raw: memoryview | None = None) -> TensorMessage:
        """Decode the description, with the tensors that have been posted if they are its own."""
        posted = self._posted.popleft()
        tensors = iter(posted.tensors)

        def fetcher(description: bytes) -> Fetch | None:
            return (lambda _, __: next(tensors)) if description == posted.description else None

        message = self.codec.decode(block, raw, fetcher)
        self._descriptions.append(self.codec.read)
        if self._wires.stream is None:
            self._wires.finish(posted.works)
        else:
            if self.codec.read != posted.description:  # it came with the description
                message.tree = on_device(message.tree, self._wires.device)
            message.on_use = self._after(posted)
        return message

    def _after(self, posted: _Posted) -> Callable[[], None]:
        """Return what makes the consumer's stream wait for tensors, and keeps them for that stream."""

        def wait() -> None:
            self._wires.finish(posted.works)
            for tensor in posted.tensors:
                tensor.record_stream(torch.cuda.current_stream(self._wires.device))

        return wait
