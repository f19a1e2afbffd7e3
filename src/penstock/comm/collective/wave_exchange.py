"""Asynchronous all-to-all exchange of weight updates between parallel pipelines, once per wave.

Each member of a group posts its own update of a wave and buffers for those of the others; no call blocks. Gloo's
handles cannot be polled, so one thread per peer waits for its messages, and one more for everything that is sent. A
message that is sent early stays with its sender until the receiver has posted a buffer, at the end of its own wave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.tagged_group import Tag, TaggedGroup, Work
from penstock.comm.core.ticket import Background, Ticket

_LANE = "the lane of waves"
WAVE_TIMEOUT = timedelta(days=30)  # a peer may be many waves behind; ranks that need its wave have their own time-out


class Posted(NamedTuple):
    """The tickets of one wave that has been posted.

    Attributes:
        sent: done when all other members have received this member's update.
        came: pipeline -> done when its update has arrived.
    """

    sent: Ticket
    came: Mapping[int, Ticket]


class Exchange(Protocol):
    """Exchanges tensors between the members of a group, each of which belongs to another pipeline."""

    def post(self, members: Members, me: Holder, wave: int, updates: Sequence[Sequence[Tensor]]) -> Posted:
        """Send a member's update to all others, and post buffers for theirs.

        Args:
            members: all members, in the order of the pipelines.
            me: the member that posts.
            wave: the number of the wave; members post wave by wave.
            updates: per member, tensors of the same shapes: the update of `me`, and buffers for the others.
        """
        ...

    def close(self) -> None:
        """Stop the background threads, if there are any, after everything that has been submitted."""
        ...


def _tickets(members: Members, me: Holder, wave: int) -> Posted:
    came = {m.pipeline: Ticket(f"{_LANE} from pipeline {m.pipeline} (wave {wave})") for m in members if m != me}
    return Posted(Ticket(f"{_LANE} to the other pipelines (wave {wave})"), came)


class LocalExchange:
    """Exchange among members that are all in this process; tensors are copied, as between processes."""

    def __init__(self) -> None:
        self._open: dict[tuple[Members, int], dict[Holder, tuple[Sequence[Sequence[Tensor]], Posted]]] = {}

    def post(self, members: Members, me: Holder, wave: int, updates: Sequence[Sequence[Tensor]]) -> Posted:
        """Exchange updates with all members that have posted this wave before."""
        here = self._open.setdefault((members, wave), {})
        mine, place = _tickets(members, me, wave), members.index(me)
        for other, (theirs, posted) in here.items():
            its_place = members.index(other)
            for tensors, others, at in ((updates, theirs, its_place), (theirs, updates, place)):
                for target, source in zip(tensors[at], others[at], strict=True):
                    target.copy_(source)
            mine.came[other.pipeline].complete()
            posted.came[me.pipeline].complete()
        here[me] = updates, mine
        if len(here) == len(members):
            del self._open[members, wave]
            for _, posted in here.values():
                posted.sent.complete()
        return mine

    def close(self) -> None:
        """Do nothing: there is no background thread."""


class GlooExchange:
    """Exchange between processes over gloo.

    Args:
        process: group rank of a holder's process; the members of a group are in different processes.
        group: with gloo on the CPU; None for the default group.
    """

    def __init__(self, process: Callable[[Holder], int], group: dist.ProcessGroup | None) -> None:
        self._process, self._messages = process, TaggedGroup(group, Tag.WAVES, WAVE_TIMEOUT)
        self._sending = Background(f"{_LANE}, sending")
        self._receiving: dict[int, Background] = {}

    def post(self, members: Members, me: Holder, wave: int, updates: Sequence[Sequence[Tensor]]) -> Posted:
        """Post all messages; those between two processes keep their order."""
        posted = _tickets(members, me, wave)
        leaving: list[Work | None] = []
        try:
            for member, tensors in zip(members, updates, strict=True):
                if member != me:
                    rank = self._process(member)
                    arriving = [self._messages.receive(tensor, rank) for tensor in tensors]
                    self._thread(rank).later([posted.came[member.pipeline]], partial(self._messages.finish, arriving))
                    leaving += [self._messages.send(tensor, rank) for tensor in updates[members.index(me)]]
        except RuntimeError as error:  # the peer is gone; reported where a ticket is waited for
            for ticket in (posted.sent, *posted.came.values()):
                ticket.complete(error=error)
            return posted
        self._sending.later([posted.sent], partial(self._messages.finish, leaving))
        return posted

    def close(self) -> None:
        """Let the threads end after everything that has been submitted."""
        for background in (self._sending, *self._receiving.values()):
            background.close()

    def _thread(self, rank: int) -> Background:
        if rank not in self._receiving:
            self._receiving[rank] = Background(f"{_LANE} from rank {rank}")
        return self._receiving[rank]
