"""Transport between processes over gloo (`torch.distributed`); the NCCL transport builds on it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.in_pieces import TransferPriority
from penstock.comm.core.devices import on_device
from penstock.comm.core.tagged_group import BlockGroup, Tag, Work
from penstock.comm.core.ticket import LATENCY, Background, Polling, Ticket, settle
from penstock.comm.p2p.codec import (
    CREDIT_RANGE,
    CREDITED,
    HEADER_BYTES,
    Codec,
    Frame,
    bytes_of,
    expect,
    has_come,
    split,
    transport_fields,
)
from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.comm.p2p.transport import Channel
from penstock.errors import TransportError
from penstock.schedule.ir.schedule import Payload
from penstock.schedule.machine.instructions import LaneKey

_FIRST_CAPACITY = 4096
_PAYLOADS = tuple(Payload)
_TAGS = {  # the next tag after each is that of the second send
    (channel, payload): Tag.LANES + 2 * (len(_PAYLOADS) * channel + i)
    for channel in Channel
    for i, payload in enumerate(_PAYLOADS)
}


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


# The two ends of a lane between processes over gloo (`torch.distributed`).
#
# A message is sent as one tensor of bytes. The receiver posts a block at least as large as the largest message of the
# lane that it has certainly consumed by then (all but the last `window`); the sender knows those sizes, too. Of a
# larger message, the header goes into that block and the rest follows as a second send. So messages of constant shape
# cost one send each, and shapes may change at any time.
#
# Gloo's handles cannot be asked whether they are done, and a thread that blocks in one of them delays the rank that
# waits for the thread. So a rank looks whether a message stands in its block, and learns from the messages that come
# back how many RECVs its peer has posted: a SEND is taken once its RECV is posted. Where looking does not help, a
# thread of the lane waits for the handles, in order; it also hears that the peer is gone. A message that is as long as
# the one before is seen when its last byte stands in the block, so that on a slow link no rank waits for the rest of a
# message that it does not need yet; one of another length, whose end cannot be known beforehand, when its header does.
# Then the rank waits for the rest; and where it hears that a SEND was taken, for what is still to be sent. A peer may
# be stopped in the midst of that, so these waits end with the patience of the lane.


class LaneEnd:
    """One end of a lane.

    Args:
        lane: between two ranks of a pipeline.
        peer: the rank at the other end.
        window: the most outstanding messages.
        group: the process group; None for the default group.
        ranks: group rank of each of the pipeline's; the same numbers if None.
        channel: training or evaluation.

    Attributes:
        lane: between two ranks of the group, for error messages.
        background: the thread that waits where looking does not help.
        patience: how long the rank itself waits for the rest of a message; the time-out of the group if None.
    """

    def __init__(
        self,
        lane: LaneKey,
        peer: int,
        window: int,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int] | None,
        channel: Channel,
    ) -> None:
        if ranks is not None:
            peer, lane = ranks[peer], lane._replace(source=ranks[lane.source], target=ranks[lane.target])
        self._window, self._peer, self.lane = window, peer, lane
        self.codec = Codec(str(self.lane))
        tag = _TAGS[channel, lane.payload]
        self._messages, self._rests = BlockGroup(group, tag), BlockGroup(group, tag + 1)
        self._largest = _FIRST_CAPACITY  # bytes of the largest message that the receiver has certainly consumed
        self.background = Background(str(self.lane))
        self.patience: timedelta | None = None

    def close(self) -> None:
        """Let the thread end after everything that it has to wait for."""
        self.background.close()

    @staticmethod
    def _complete(work: Work | None, patience: timedelta | None) -> None:
        """Wait until what has begun is complete.

        Raises:
            RuntimeError: the peer is dead.
            TransportError: it took longer than `patience`.
        """
        if work is None:
            return
        try:
            if patience is None:
                work.wait()
            else:
                work.wait(patience)
        except RuntimeError as error:
            if patience is None or "Timed out" not in str(error):
                raise
            limit = f"{patience.total_seconds():g} seconds"
            raise TransportError(
                f"a message has stopped on its way for {limit}; the peer is stalled or dead"
            ) from error


class _Sent(Ticket):
    """A posted SEND."""

    __slots__ = ("_lane", "frame", "work")

    def __init__(self, lane: SendLane, frame: Frame) -> None:
        super().__init__(lane.lane)
        self._lane = lane
        self.frame: Frame | None = frame
        self.work: Work | None = None

    def settles(self, timeout: float, polling: Polling = LATENCY) -> bool:
        """Have the thread wait for it, and wait for the thread: what comes back is not looked at meanwhile."""
        self._lane.hand_over()
        return super().settles(timeout, polling)


class SendLane(LaneEnd):
    """The sending end of a lane.

    Attributes:
        back: for every payload the lane back from the receiver, whose posted RECVs its messages tell of.
        priority: of the rank; sums wait while a message is under way.
    """

    def __init__(
        self, lane: LaneKey, window: int, group: dist.ProcessGroup | None, ranks: Sequence[int] | None = None,
        channel: Channel = Channel.TRAINING,
    ) -> None:  # fmt: skip
        super().__init__(lane, lane.target, window, group, ranks, channel)
        self._recent: deque[int] = deque()  # bytes of the last messages sent, which the peer may not have consumed
        self._open: deque[_Sent] = deque()  # not known to be taken, nor handed to the thread
        self._rest_of: deque[tuple[int, Work | None]] = deque()  # second sends, with the number of the message
        self._count = self._taken = 0
        self.back: Sequence[ReceiveLane | None] = [None] * len(CREDITED)
        self.priority = TransferPriority()
        self._lock = threading.Lock()

    def send(self, message: TensorMessage) -> Ticket:
        """Post a SEND of a message, which tells the receiver which of its own SENDs have been taken."""
        credit = [0 if receiving is None else receiving.posted % CREDIT_RANGE for receiving in self.back]
        frame = self.codec.fill(message, credit)
        ticket, block, nbytes = _Sent(self, frame), frame.block, len(frame.raw)
        if len(self._recent) >= self._window:
            self._largest = max(self._largest, self._recent.popleft())
        self._recent.append(nbytes)
        try:
            if nbytes <= self._largest:
                ticket.work = self._messages.send(block, self._peer)
            else:
                head, rest = split(block)
                ticket.frame = None  # of which the second send may be under way longer
                ticket.work = self._messages.send(head, self._peer)
                self._rest_of.append((self._count, self._rests.send(rest, self._peer)))
        except RuntimeError as error:  # the peer is gone; reported where the ticket is waited for
            ticket.complete(error=error)
            return ticket
        self.priority.message()
        with self._lock:
            self._open.append(ticket)
            self._count += 1
        return ticket

    def credit(self, posted: int) -> None:
        """Take note of how many RECVs of the lane the peer has posted, modulo `CREDIT_RANGE`."""
        taken, rests = [], []
        with self._lock:
            new = (posted - self._taken) % CREDIT_RANGE
            self._taken += new if new < CREDIT_RANGE // 2 else 0  # else it is older than what is known
            while self._open and len(self._open) > self._count - self._taken:
                taken.append(self._open.popleft())
            # A RECV is posted once all messages before it but a window of them have been consumed.
            while self._rest_of and self._rest_of[0][0] + self._window < self._taken:
                rests.append(self._rest_of.popleft()[1])
        for ticket in taken:
            settle([ticket], partial(self._finish, ticket, self.patience))
        self._rests.finish(rests)  # consumed long ago

    def hand_over(self) -> None:
        """Have the thread wait for all that are not known to be taken."""
        with self._lock:
            tickets = list(self._open)
            self._open.clear()
        for ticket in tickets:
            self.background.later([ticket], partial(self._finish, ticket))

    def close(self) -> None:
        """Let the thread end after everything that has been posted."""
        self.background.later([], partial(self._rests.finish, [work for _, work in self._rest_of]))
        super().close()

    def _finish(self, ticket: _Sent, patience: timedelta | None = None) -> None:
        work, frame, ticket.work, ticket.frame = ticket.work, ticket.frame, None, None
        self._complete(work, patience)
        if frame is not None:
            frame.free.append(frame)


class _Received(Ticket):
    """A posted RECV; the block holds its message as soon as that has come."""

    __slots__ = ("_lane", "block", "expected", "raw", "work")

    def __init__(self, lane: ReceiveLane, nbytes: int, expected: int) -> None:
        super().__init__(lane.lane, nbytes)
        self._lane, self.block = lane, torch.empty(nbytes, dtype=torch.uint8)
        self.raw = bytes_of(self.block)
        self.expected = expected  # bytes of the message, probably
        self.work: Work | None = None
        expect(self.raw, expected)

    @property
    def done(self) -> bool:
        """Whether it has completed or failed; looks."""
        if not self._done:
            self._lane.look()
        return self._done

    def _stop_polling(self) -> None:
        self._lane.hand_over()


class ReceiveLane(LaneEnd):
    """The receiving end of a lane.

    Args:
        lane, window, group, ranks, channel: as of any end.
        device: where tensors go.

    Attributes:
        posted: how many RECVs.
        back: for every payload the lane back to the sender, whose SENDs the credits of the messages are about.
    """

    def __init__(
        self, lane: LaneKey, window: int, group: dist.ProcessGroup | None, ranks: Sequence[int] | None = None,
        channel: Channel = Channel.TRAINING, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lane, lane.source, window, group, ranks, channel)
        self._device = None if device is None or device.type == "cpu" else device
        self._open: deque[_Received] = deque()  # in order, without those that the thread waits for
        self._handed: _Received | None = None  # the last of those
        self._usual = 0  # bytes of the last message
        self.posted = 0
        self.back: list[tuple[int, SendLane]] = []

    def receive(self) -> Ticket:
        """Post a RECV for the next message of the lane."""
        ticket = _Received(self, self._largest, self._usual)
        try:
            ticket.work = self._messages.receive(ticket.block, self._peer)
        except RuntimeError as error:
            ticket.complete(error=error)
            return ticket
        self.posted += 1
        self._open.append(ticket)
        return ticket

    def look(self) -> None:
        """Complete, in order, what has come."""
        if self._handed is not None and not self._handed._done:
            return
        self._handed = None
        while self._open and has_come(self._open[0].raw, self._open[0].expected):
            ticket = self._open.popleft()
            settle([ticket], partial(self._finish, ticket, self.patience))

    def hand_over(self) -> None:
        """Have the thread wait for all that have been posted."""
        while self._open:
            ticket = self._handed = self._open.popleft()
            self.background.later([ticket], partial(self._finish, ticket))

    def decode(self, block: Tensor, raw: memoryview | None = None) -> TensorMessage:
        """Decode a complete block; its tensors are views of it, or copies on the device of the rank.

        Args:
            block: that has come.
            raw: its memory, where that is at hand.
        """
        message = self.codec.decode(block, raw)
        if self._device is not None:
            message.tree = on_device(message.tree, self._device)
        return message

    def _finish(self, ticket: _Received, patience: timedelta | None = None) -> TensorMessage:
        block, raw, work = ticket.block, ticket.raw, ticket.work
        del ticket.block, ticket.raw, ticket.work  # the ticket may be kept longer than the message lives
        self._complete(work, patience)
        size, continued, credit = transport_fields(raw)
        for place, lane in self.back:
            lane.credit(credit[place])
        self._largest, self._usual = max(self._largest, size), size
        if continued:
            return self.decode(self._with_rest(block, size, patience))
        # Do not keep a large block alive if the message uses less than half of it.
        wasteful = size < len(raw) // 2 and len(raw) > _FIRST_CAPACITY
        return self.decode(block[:size].clone()) if wasteful else self.decode(block, raw)

    def _with_rest(self, block: Tensor, size: int, patience: timedelta | None) -> Tensor:
        whole = torch.empty(size, dtype=torch.uint8)
        whole[:HEADER_BYTES] = block[:HEADER_BYTES]
        self._complete(self._rests.receive(whole[HEADER_BYTES:], self._peer), patience)
        return whole
