"""The interface between the executors and the transports that move messages.

Nothing here blocks: posting a message returns a `Ticket`, and the executor decides when to wait for it, so that the
same executor runs with all its peers in one process or alone in a process of its own.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.message import TensorMessage
from penstock.schedule.machine.instructions import LaneKey


class Channel(IntEnum):
    """Separates the messages of training from those of an evaluation during training."""

    TRAINING = 0
    EVALUATION = 1


class Transport(Protocol):
    """Moves messages along the lanes of one rank (a lane: source, target, payload)."""

    def receive(self, lane: LaneKey) -> Ticket:
        """Post a RECV; the ticket's result is the message."""
        ...

    def send(self, lane: LaneKey, message: TensorMessage) -> Ticket:
        """Post a SEND; the caller keeps at most a window of them outstanding per lane."""
        ...

    def close(self) -> None:
        """Stop the background threads, if there are any."""
        ...
