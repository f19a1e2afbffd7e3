"""The interface between the executors and the transports that move messages.

Nothing here blocks: posting a message returns a `Ticket`, and the executor decides when to wait for it, so that the
same executor runs with all its peers in one process or alone in a process of its own.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from penstock.comm.core.ticket import Ticket
from penstock.comm.message.tensor_message import TensorMessage
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
