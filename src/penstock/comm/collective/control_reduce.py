"""Where stages meet: each hands in its share of a batch and learns the sum of all, while it goes on with its work.

Shares go to the rank of the first stage, whose last backward ends a batch, and the sum comes back: two hops after the
last share, on messages of their own, which wait behind nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.background import Background
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.ticket import Ticket
from penstock.weights.decision import Share, add_shares

CONTROL_LANE = "the control lane"
_TAG = 8  # on the pipelines' group; lanes use others


class Council(Protocol):
    """Adds the shares of all stages that are trained."""

    def hand_in(self, holder: Holder, batch: int, share: Share, ticket: Ticket) -> None:
        """Hand in the share of a stage, batch by batch; the sum becomes the result of the ticket."""
        ...

    def close(self) -> None:
        """Stop whatever runs in the background, once all it was given is done."""
        ...


class _Rounds:
    """Shares that have been handed in, until those of a batch are complete."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self._open: dict[int, dict[Holder, tuple[Share, Ticket]]] = {}

    def add(self, holder: Holder, batch: int, share: Share, ticket: Ticket) -> tuple[list[Share], list[Ticket]] | None:
        """Add one; returns all of the batch, in the order of the holders, if this was the last."""
        here = self._open.setdefault(batch, {})
        here[holder] = share, ticket
        if len(here) < len(self._holders):
            return None
        del self._open[batch]
        return [here[h][0] for h in self._holders], [ticket for _, ticket in here.values()]


class LocalCouncil:
    """All holders in one process.

    Args:
        holders: of stages that are trained.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._rounds = _Rounds(holders)

    def hand_in(self, holder: Holder, batch: int, share: Share, ticket: Ticket) -> None:
        """Hand in a share."""
        complete = self._rounds.add(holder, batch, share, ticket)
        if complete is not None:
            shares, tickets = complete
            total = add_shares(shares)
            for waiting in tickets:
                waiting.complete(total)

    def close(self) -> None:
        """Nothing runs in the background."""


class GlooCouncil:
    """One process's rank, with a thread that waits for the others.

    Args:
        holders: of stages that are trained, in all processes; the process of the first one adds the shares.
        process: group rank of a holder's process.
        group: with gloo on the CPU.
        tag: of its messages.
        patience: how long the thread waits for the others; the time-out of the group if None.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        process: Callable[[Holder], int],
        group: dist.ProcessGroup | None,
        tag: int = _TAG,
        patience: timedelta | None = None,
    ) -> None:
        self._group, self._rank, self._tag = group, dist.get_rank(group), tag
        self._patience = () if patience is None else (patience,)
        self._seats = Counter(map(process, holders))
        self._chair = process(holders[0]) if holders else 0
        self._rounds = _Rounds([holder for holder in holders if process(holder) == self._rank])
        self._background = Background(CONTROL_LANE)

    def hand_in(self, holder: Holder, batch: int, share: Share, ticket: Ticket) -> None:
        """Hand in a share."""
        complete = self._rounds.add(holder, batch, share, ticket)
        if complete is not None:
            shares, tickets = complete
            meet = self._preside if self._rank == self._chair else self._attend
            self._background.later(tickets, partial(meet, shares))

    def close(self) -> None:
        """Let the thread end once all it was given is done."""
        self._background.close()

    def _preside(self, own: list[Share]) -> Share:
        """Collect all shares, add them, tell everybody."""
        others = {r: _empty(count) for r, count in self._seats.items() if r != self._rank}
        arriving = [dist.irecv(block, group=self._group, tag=self._tag, group_src=r) for r, block in others.items()]
        self._finish(arriving)
        shares = own + [Share(*row) for block in others.values() for row in block.tolist()]
        total = add_shares(shares)
        answer = torch.tensor([total], dtype=torch.float64)
        leaving = [dist.isend(answer, group=self._group, tag=self._tag, group_dst=r) for r in others]
        self._finish(leaving)
        return total

    def _attend(self, own: list[Share]) -> Share:
        """Send the own shares to the chair and hear the sum."""
        answer = _empty(1)
        arriving = dist.irecv(answer, group=self._group, tag=self._tag, group_src=self._chair)
        shares = torch.tensor(own, dtype=torch.float64)
        leaving = dist.isend(shares, group=self._group, tag=self._tag, group_dst=self._chair)
        self._finish([leaving, arriving])
        return Share(*answer[0].tolist())

    def _finish(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(*self._patience)


def _empty(rows: int) -> Tensor:
    return torch.empty(rows, len(Share._fields), dtype=torch.float64)
