"""Priorities among the transfers of a rank that share a link: messages between stages go before sums.

Somebody waits for a message, while the sum of a gradient is wanted only by the update. A message waits for what its
rank has handed to the link before it. So a sum travels in pieces, several at a time, but one at a time where messages
come between them. That delays a sum by a share of its own time; it waits for no message, nor for a time that would
have to be guessed.
"""

from __future__ import annotations


class TransferPriority:
    """Counts the messages of one rank.

    Attributes:
        messages: that have been posted.
    """

    def __init__(self) -> None:
        self.messages = 0

    def message(self) -> None:
        """Take note of a message that has been posted."""
        self.messages += 1


class PieceWindow:
    """How many pieces of a sum may be under way: one at first and after each message, the most after so many pieces.

    Args:
        priority: of the rank; before its first message, it is the most.
        most: pieces.
    """

    def __init__(self, priority: TransferPriority, most: int) -> None:
        self._priority, self._most = priority, most
        self._messages, self._pieces = 0, most  # seen so far, and pieces since then

    def next(self) -> int:
        """Return how many may be under way with the next piece, itself included."""
        if self._messages != self._priority.messages:
            self._messages, self._pieces = self._priority.messages, 0
        self._pieces += 1
        return self._most if self._pieces > self._most else 1
