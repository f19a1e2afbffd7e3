"""The places of a rank for gradients at full size: a backward that begins one too many waits for the sum of another."""

from __future__ import annotations

from collections import deque

from penstock.comm.core.ticket import Ticket
from penstock.schedule.ir.schedule import Stage

Key = tuple[Stage, int]
"""A stage, and the batch of a gradient."""


class GradientPlaces:
    """The places of one rank during one span; the machine model has the same (`schedule.machine.collective_state`).

    Args:
        places: how many there are.
    """

    def __init__(self, places: int) -> None:
        self._begun: set[Key] = set()
        # Of the places that no backward adds to, in the order in which they are taken again: what frees them.
        self._freed: deque[Ticket | None] = deque([None] * places)
        self._parts: dict[Stage, tuple[int, Ticket]] = {}  # the last sum of each stage, and its batch

    def needed(self, key: Key) -> Ticket | None:
        """Return the sum that a backward waits for before it adds to a gradient; None if it need not wait."""
        if key in self._begun:
            return None
        batch, part = self._parts.get(key[0], (-1, None))
        if part is not None and batch == key[1] and not part.done:
            return part  # the next part takes the same memory
        assert self._freed, "the proof of the schedule: a REDUCE of another gradient comes before"
        ticket = self._freed[0]
        return None if ticket is None or ticket.done else ticket

    def take(self, key: Key) -> None:
        """Begin a gradient, unless it has begun; nothing is needed any more."""
        if key not in self._begun:
            ticket = self._freed.popleft()
            assert ticket is None or ticket.done
            self._begun.add(key)

    def reduce(self, key: Key, ticket: Ticket) -> None:
        """Take note of what frees the place of a gradient: the end of its sum."""
        self._begun.discard(key)
        self._freed.append(ticket)
        self._parts[key[0]] = key[1], ticket
