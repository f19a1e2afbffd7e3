"""What parallel pipelines send each other wave by wave, while passes go on: all to all, without adding anything up.

Each member of a group posts what it has of a wave, and room for what the others have; nobody waits for anybody. A gloo
handle cannot be asked whether it is done, so a thread per peer waits for what comes from it, and another one for all
that leaves. What leaves early lies with its sender until the receiver has made room for it, at the end of its own wave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.background import Background
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.ticket import Ticket

_LANE = "the lane of waves"
PATIENCE = timedelta(days=30)  # a peer may be waves behind; who needs its wave says how long it waits for it


class Posted(NamedTuple):
    """A wave on its way.

    Attributes:
        sent: done when all others have this member's part.
        came: by the number of a pipeline, done when its part is there.
    """

    sent: Ticket
    came: Mapping[int, Ticket]


class Exchange(Protocol):
    """Moves tensors between members of groups, of which each is in another pipeline."""

    def post(self, members: Members, me: Holder, wave: int, updates: Sequence[Sequence[Tensor]]) -> Posted:
        """Send a member's part to all others, and make room for theirs.

        Args:
            members: all of them, in the order of the pipelines.
            me: who posts.
            wave: of which; members post wave by wave.
            updates: by place among the members, tensors of the same shapes: its part, and room for those of others.
        """
        ...

    def close(self) -> None:
        """Stop whatever runs in the background, once all it was given is done."""
        ...


def _tickets(members: Members, me: Holder, wave: int) -> Posted:
    came = {m.pipeline: Ticket(f"{_LANE} from pipeline {m.pipeline} (wave {wave})") for m in members if m != me}
    return Posted(Ticket(f"{_LANE} to the other pipelines (wave {wave})"), came)


class LocalExchange:
    """All members in one process; what is handed over is a copy, as it would be between processes."""

    def __init__(self) -> None:
        self._open: dict[tuple[Members, int], dict[Holder, tuple[Sequence[Sequence[Tensor]], Posted]]] = {}

    def post(self, members: Members, me: Holder, wave: int, updates: Sequence[Sequence[Tensor]]) -> Posted:
        """Hand over to all that have posted, and take from them."""
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
        """Nothing runs in the background."""


class GlooExchange:
    """One process's part.

    Args:
        process: group rank of a holder's process; members of a group are in different ones.
        group: with gloo on the CPU; None for the default group.
        tag: of its messages.
    """

    def __init__(self, process: Callable[[Holder], int], group: dist.ProcessGroup | None, tag: int) -> None:
        self._process, self._group, self._tag = process, group, tag
        self._sending = Background(f"{_LANE}, sending")
        self._receiving: dict[int, Background] = {}

    def post(self, members: Members, me: Holder, wave: int, updates: Sequence[Sequence[Tensor]]) -> Posted:
        """Post all messages; those between two processes keep one order."""
        posted = _tickets(members, me, wave)
        leaving: list[Any] = []
        try:
            for member, tensors in zip(members, updates, strict=True):
                if member != me:
                    rank = self._process(member)
                    arriving = [self._receive(tensor, rank) for tensor in tensors]
                    self._thread(rank).later([posted.came[member.pipeline]], partial(_finish, arriving))
                    leaving += [self._send(tensor, rank) for tensor in updates[members.index(me)]]
        except RuntimeError as error:  # the peer is gone; who waits for the tickets says what for
            for ticket in (posted.sent, *posted.came.values()):
                ticket.complete(error=error)
            return posted
        self._sending.later([posted.sent], partial(_finish, leaving))
        return posted

    def close(self) -> None:
        """Let the threads end once all they were given is done."""
        for background in (self._sending, *self._receiving.values()):
            background.close()

    def _thread(self, rank: int) -> Background:
        if rank not in self._receiving:
            self._receiving[rank] = Background(f"{_LANE} from rank {rank}")
        return self._receiving[rank]

    def _send(self, tensor: Tensor, rank: int) -> Any:
        return dist.isend(tensor, group=self._group, tag=self._tag, group_dst=rank)

    def _receive(self, tensor: Tensor, rank: int) -> Any:
        return dist.irecv(tensor, group=self._group, tag=self._tag, group_src=rank)


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait(PATIENCE)
