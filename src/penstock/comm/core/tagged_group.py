"""Point-to-point messages of one kind on a process group, kept apart from other kinds by their tag."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch.distributed as dist
from torch import Tensor


class Tag(IntEnum):
    """Tags of all messages on the group of the pipelines' ranks; messages of one pair of ranks and one tag are ordered.

    Clocks are compared under tag 0 before anything else is sent. The lanes of the schedule use `LANES` and all above.
    """

    STATE = 5
    GATHER = 6
    INITIAL_WEIGHTS = 7
    CONTROL = 8
    GRADIENTS = 9
    TIED_GRADIENTS = 10
    AVERAGES = 11
    GLOBAL_CONTROL = 12
    WAVES = 13
    LANES = 16


class TaggedGroup:
    """Non-blocking sends and receives of tensors on a process group, all under one tag.

    Empty tensors are not sent: both ends know the shape.

    Args:
        group: the process group; None for the default group.
        tag: of the messages.
        timeout: how long `finish` waits for each message; the time-out of the group if None.
    """

    def __init__(self, group: dist.ProcessGroup | None, tag: int, timeout: timedelta | None = None) -> None:
        self.group, self._tag = group, int(tag)
        self._timeout = () if timeout is None else (timeout,)

    def send(self, tensor: Tensor, rank: int) -> dist.Work | None:
        """Start to send a tensor to a rank of the group; the tensor must live, unchanged, until `finish` returns.

        Raises:
            RuntimeError: the connection to the peer is lost.
        """
        return dist.isend(tensor, group=self.group, tag=self._tag, group_dst=rank) if tensor.numel() else None

    def receive(self, tensor: Tensor, rank: int) -> dist.Work | None:
        """Start to receive a tensor from a rank of the group.

        Raises:
            RuntimeError: the connection to the peer is lost.
        """
        return dist.irecv(tensor, group=self.group, tag=self._tag, group_src=rank) if tensor.numel() else None

    def finish(self, works: Sequence[dist.Work | None]) -> None:
        """Wait until the given sends and receives are complete.

        Raises:
            RuntimeError: a peer is dead, or a message did not come in time.
        """
        for work in works:
            if work is not None:
                work.wait(*self._timeout)
