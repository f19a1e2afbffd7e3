"""The interface between the executors and the transports that move messages.

Nothing here blocks: posting a message returns a `Ticket`, and the executor decides when to wait for it, so that the
same executor runs with all its peers in one process or alone in a process of its own.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.codec import Structure, dump_structure, form_of, structure_of
from penstock.comm.p2p.tensor_message import TensorMessage
from penstock.comm.p2p.trees import copied
from penstock.schedule.machine.instructions import LaneKey


class Channel(IntEnum):
    """Separates the messages of training from those of an evaluation during training."""

    TRAINING = 0
    EVALUATION = 1


class Sender(Protocol):
    """The sending end of a lane."""

    def send(self, message: TensorMessage) -> Ticket:
        """Post a SEND; the caller keeps at most a window of them outstanding."""
        ...


class Receiver(Protocol):
    """The receiving end of a lane."""

    def receive(self) -> Ticket:
        """Post a RECV; the ticket's result is the message."""
        ...


class Transport(Protocol):
    """Moves messages along the lanes of one rank (a lane: source, target, payload)."""

    def sender(self, lane: LaneKey) -> Sender:
        """Return the end of a lane that begins at this rank."""
        ...

    def receiver(self, lane: LaneKey) -> Receiver:
        """Return the end of a lane that ends at this rank."""
        ...

    def close(self) -> None:
        """Stop the background threads, if there are any."""
        ...


# All ranks in one process: messages are handed over in memory.
#
# What is handed over is a copy, as it would be between processes: a stage that writes into its input does not touch
# what the stage before it saved for its backward.


class LocalLane:
    """Both ends of a lane.

    Args:
        lane: between two ranks of a pipeline.
    """

    def __init__(self, lane: LaneKey) -> None:
        self.lane = lane
        self._sends: deque[tuple[Ticket, TensorMessage]] = deque()
        self._receives: deque[Ticket] = deque()
        self._structure: Structure | None = None
        self._form: tuple[object, ...] | None = None

    def receive(self) -> Ticket:
        """Post a RECV; it completes at once if the message is there."""
        ticket = Ticket(self.lane)
        if self._sends:
            sent, message = self._sends.popleft()
            sent.complete()
            ticket.complete(message)
        else:
            self._receives.append(ticket)
        return ticket

    def send(self, message: TensorMessage) -> Ticket:
        """Post a SEND; it completes when the RECV has been posted."""
        ticket, form = Ticket(self.lane), form_of(message)
        if form is None or form != self._form:
            self._check(message)
            self._form = form
        message.tree = _copied(message.tree)
        if self._receives:
            ticket.complete()
            self._receives.popleft().complete(message)
        else:
            self._sends.append((ticket, message))
        return ticket

    def _check(self, message: TensorMessage) -> None:
        """Refuse a message that could not travel between processes."""
        structure = structure_of(message, str(self.lane))
        if structure != self._structure:
            dump_structure(structure, str(self.lane))
            self._structure = structure


class LocalTransport:
    """Lanes between ranks of one process; one object serves them all."""

    def __init__(self) -> None:
        self._lanes: dict[LaneKey, LocalLane] = {}

    def sender(self, lane: LaneKey) -> LocalLane:
        """Return a lane."""
        return self._lanes.setdefault(lane, LocalLane(lane))

    def receiver(self, lane: LaneKey) -> LocalLane:
        """Return a lane."""
        return self.sender(lane)

    def close(self) -> None:
        """Forget what is under way."""
        self._lanes.clear()


def _copied(tree: object) -> object:
    if isinstance(tree, Tensor):
        return copied(tree)
    if type(tree) is list and len(tree) == 1 and isinstance(tree[0], Tensor):
        return [copied(tree[0])]  # without torch's walk, which is slow
    return pytree.tree_map(lambda x: copied(x) if isinstance(x, Tensor) else x, tree)
