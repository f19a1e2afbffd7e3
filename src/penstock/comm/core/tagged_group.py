"""Point-to-point messages of one kind on a process group, kept apart from other kinds by their tag."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor


class Tag(IntEnum):
    """Tags of all messages on the group of the pipelines' ranks; messages of one pair of ranks and one tag are ordered.

    Clocks are compared under tag 0 before anything else is sent. The lanes of the schedule use `LANES` and all above.
    """

    PARTS = 4
    STATE = 5
    GATHER = 6
    INITIAL_WEIGHTS = 7
    CONTROL = 8
    GRADIENTS = 9
    TIED_GRADIENTS = 10
    AVERAGES = 11
    GLOBAL_CONTROL = 12
    WAVES = 13
    GRADIENT_SUMS = 14
    TIED_GRADIENT_SUMS = 15
    AVERAGE_SUMS = 16
    WEIGHT_SHARDS = 17
    LANES = 18


class _ToDevice:
    """A receive into memory of the host, from where the tensor goes on to its device."""

    def __init__(self, work: dist.Work | None, host: Tensor, tensor: Tensor) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self, *timeout: timedelta) -> None:
        """Block until it is complete, and copy."""
        if self._work is not None:
            self._work.wait(*timeout)
        self._tensor.copy_(self._host)


Work = dist.Work | _ToDevice
"""A send or receive that is under way."""


class TaggedGroup:
    """Non-blocking sends and receives of tensors on a process group, all under one tag.

    Empty tensors are not sent: both ends know the shape. Tensors on a GPU pass through memory of the host, because
    gloo cannot reach them and NCCL does not know tags.

    Args:
        group: the process group; None for the default group.
        tag: of the messages.
        timeout: how long `finish` waits for each message; the time-out of the group if None.
        direct: the backend of the group reaches all tensors, and nothing else is sent on it.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, tag: int, timeout: timedelta | None = None, *, direct: bool = False
    ) -> None:
        self.group, self._tag, self._direct = group, int(tag), direct
        self._timeout = () if timeout is None else (timeout,)

    def send(self, tensor: Tensor, rank: int) -> Work | None:
        """Start to send a tensor to a rank of the group; the tensor must live, unchanged, until `finish` returns.

        Raises:
            RuntimeError: the connection to the peer is lost.
        """
        if not tensor.numel():
            return None
        if self._passes_host(tensor):
            tensor = tensor.cpu()  # the work keeps it alive
        return dist.isend(tensor, group=self.group, tag=self._tag, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int) -> Work | None:
        """Start to receive a tensor from a rank of the group.

        Raises:
            RuntimeError: the connection to the peer is lost.
        """
        if not tensor.numel():
            return None
        if not self._passes_host(tensor):
            return dist.irecv(tensor, group=self.group, tag=self._tag, group_src=rank)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _ToDevice(dist.irecv(host, group=self.group, tag=self._tag, group_src=rank), host, tensor)

    def _passes_host(self, tensor: Tensor) -> bool:
        return not self._direct and tensor.device.type != "cpu"

    def finish(self, works: Sequence[Work | None], timeout: timedelta | None = None) -> None:
        """Wait until the given sends and receives are complete.

        Args:
            works: what was started.
            timeout: how long to wait for each; that of this object if None.

        Raises:
            RuntimeError: a peer is dead, or a message did not come in time.
        """
        limit = self._timeout if timeout is None else (timeout,)
        for work in works:
            if work is not None:
                work.wait(*limit)


class BlockGroup(TaggedGroup):
    """The same for blocks of bytes in the memory of the host.

    It does without torch's checks of arguments, which take longer than a small message.
    """

    @cached_property
    def _reached(self) -> dist.ProcessGroup:
        """The group, be it the default one."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group

    def send(self, tensor: Tensor, rank: int) -> Work:
        """Start to send a block to a rank of the group; it must live, unchanged, until `finish` returns.

        Raises:
            RuntimeError: the connection to the peer is lost.
        """
        return self._reached.send([tensor], rank, self._tag)

    def receive(self, tensor: Tensor, rank: int) -> Work:
        """Start to receive a block from a rank of the group.

        Raises:
            RuntimeError: the connection to the peer is lost.
        """
        return self._reached.recv([tensor], rank, self._tag)
