"""Sums and copies of tensors in pieces, a few of which are under way at a time, and messages between stages first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from penstock.comm.core.transfer_priority import TransferPriority

PIECE = 1 << 18  # elements that travel at once: what a message between stages may have to wait for
AHEAD = 2  # pieces that are under way in each step, while one is waited for

Piece = Iterator[None]
"""A sum or a copy of one piece, in steps: it stops where it has to wait for what it has posted."""


class _UnderWay:
    """The pieces that are under way, by the number of steps that each has taken."""

    def __init__(self, priority: TransferPriority) -> None:
        self._priority, self._steps = priority, list[deque[Piece]]()
        self.since = 0.0  # when a piece was last complete, with others under way ever since; 0 if not

    def enter(self, piece: Piece, step: int = 0) -> bool:
        """Let a piece take its next step; returns whether it is complete."""
        done = object()
        if next(piece, done) is done:
            return True
        if step == len(self._steps):
            self._steps.append(deque())
        self._steps[step].append(piece)
        return False

    def advance(self, ahead: int, nbytes: int, step: int = 0) -> None:
        """Go on with the oldest pieces, until at most so many wait in each step.

        Args:
            ahead: how many may be left in each.
            nbytes: that travel for a piece; 0 where its pace does not count.
            step: the first one to look at.
        """
        while step < len(self._steps) and len(self._steps[step]) > ahead:
            if self.enter(self._steps[step].popleft(), step + 1):
                now = time.perf_counter()
                if self.since and nbytes:
                    self._priority.piece(nbytes, now - self.since)
                self.since = now
            else:
                self.advance(ahead, nbytes, step + 1)


def in_pieces(pieces: Iterable[tuple[Piece, int]], priority: TransferPriority, ahead: int) -> None:
    """Run all pieces, each of which posts messages and waits for them.

    Args:
        pieces: in order, each with the bytes that travel for it.
        priority: of the rank, whose messages between stages go first.
        ahead: how many are under way in each step.
    """
    line = _UnderWay(priority)
    for piece, nbytes in pieces:
        if priority.yield_to_messages():
            line.since = 0.0
        line.enter(piece)
        line.advance(ahead - 1, nbytes)
    line.since = 0.0
    line.advance(0, 0)


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
