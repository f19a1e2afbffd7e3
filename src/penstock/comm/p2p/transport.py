"""The interface between executors and whatever moves messages.

A transport moves parcels along lanes. Nothing here blocks: posting returns a `Ticket`, and the executor decides when
to wait for it, so that the same executor runs with its peers in one process or alone in its own.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from penstock.comm.core.ticket import Ticket
from penstock.comm.p2p.message import Parcel
from penstock.schedule.machine.instructions import LaneKey


class Channel(IntEnum):
    """Lanes of training and those of evaluations in its midst are apart."""

    TRAINING = 0
    EVALUATION = 1


class Transport(Protocol):
    """Moves parcels along the lanes of one rank."""

    def receive(self, lane: LaneKey) -> Ticket:
        """Post a RECV."""
        ...

    def send(self, lane: LaneKey, parcel: Parcel) -> Ticket:
        """Post a SEND; the caller keeps at most a window of them outstanding."""
        ...

    def close(self) -> None:
        """Stop whatever runs in the background."""
        ...
