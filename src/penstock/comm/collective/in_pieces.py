"""Sums and copies of tensors in pieces, a few of which are under way at a time, and messages between stages first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

PIECE = 1 << 17  # elements that travel at once: what a message between stages may have to wait for
AHEAD = 4  # pieces that are under way in each step, at most

Piece = Iterator[None]
"""A sum or a copy of one piece, in steps: it stops where it has to wait for what it has posted."""


class _UnderWay:
    """The pieces that are under way, by the number of steps that each has taken."""

    def __init__(self) -> None:
        self._steps = list[deque[Piece]]()

    def enter(self, piece: Piece, step: int = 0) -> None:
        """Let a piece take its next step."""
        done = object()
        if next(piece, done) is done:
            return
        if step == len(self._steps):
            self._steps.append(deque())
        self._steps[step].append(piece)

    def advance(self, ahead: int, step: int = 0) -> None:
        """Go on with the oldest pieces, until at most `ahead` wait in each step, from `step` on."""
        while step < len(self._steps) and len(self._steps[step]) > ahead:
            self.enter(self._steps[step].popleft(), step + 1)
            self.advance(ahead, step + 1)


def in_pieces(pieces: Iterable[Piece], priority: TransferPriority | None, ahead: int) -> None:
    """Run all pieces, each of which posts messages and waits for them.

    Args:
        pieces: in order.
        priority: of the rank, whose messages between stages go first; None for what passes wait for, too.
        ahead: how many are under way in each step, at most.
    """
    line, window = _UnderWay(), PieceWindow(priority or TransferPriority(), ahead)
    for piece in pieces:
        line.advance(window.next() - 1)
        line.enter(piece)
    line.advance(0)


def cut(tensors: Iterable[Tensor], size: int) -> list[list[Tensor]]:
    """Divide flat tensors, one after the other, into groups that travel as one message each.

    Args:
        tensors: of one dimension.
        size: elements of a group at most; a tensor is divided where it takes more, or where a dtype ends.
    """
    groups: list[list[Tensor]] = []
    room, dtype = 0, None
    for tensor in tensors:
        rest = tensor
        while rest.numel():
            if not room or rest.dtype != dtype:
                groups.append([])
                room, dtype = size, rest.dtype
            groups[-1].append(rest[:room])
            taken = groups[-1][-1].numel()
            rest, room = rest[taken:], room - taken
    return groups


def packed(group: Sequence[Tensor]) -> Tensor:
    """Return a group as one tensor: its only one, or a copy of all."""
    return group[0] if len(group) == 1 else torch.cat(list(group))


def unpack(whole: Tensor, group: Sequence[Tensor]) -> None:
    """Copy what `packed` has put together back, unless it is the only tensor of the group itself."""
    if len(group) == 1 and group[0] is whole:
        return
    for tensor, part in zip(group, torch.split(whole, [tensor.numel() for tensor in group]), strict=True):
        tensor.copy_(part)


# Priorities among the transfers of a rank that share a link: messages between stages go before sums.
#
# Somebody waits for a message, while the sum of a gradient is wanted only by the update. A message waits for what its
# rank has handed to the link before it. So a sum travels in pieces, several at a time, but one at a time where messages
# come between them. That delays a sum by a share of its own time; it waits for no message, nor for a time that would
# have to be guessed.


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
