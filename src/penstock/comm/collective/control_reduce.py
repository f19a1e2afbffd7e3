"""Asynchronous all-reduce of a few scalars per batch (loss, weight, gradient norm, stop request) over all stages.

Contributions go to the rank of the first stage, whose last backward ends a batch, and the sum comes back: two hops
after the last contribution, on messages of their own, which queue behind nothing. A thread communicates while the rank
continues to compute. The caller defines what the scalars mean and how they are added.
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
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.comm.core.ticket import Ticket

CONTROL_LANE = "the control lane"


Scalars = tuple[float, ...]
"""A NamedTuple of floats; all contributions to a sum have the same type."""

Add = Callable[[Sequence[Any]], Scalars]
"""Adds the contributions of one batch, which are given in the order of the holders."""


class ControlReduce(Protocol):
    """Adds contributions of scalars over a fixed set of stages, batch by batch."""

    def contribute(self, holder: Holder, batch: int, scalars: Scalars, ticket: Ticket) -> None:
        """Contribute the scalars of a stage to a batch; the sum over all stages becomes the result of the ticket."""
        ...

    def close(self) -> None:
        """Stop the background thread, if there is one, after everything that has been submitted."""
        ...


class _Rounds:
    """Collects contributions until those of a batch are complete."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self._open: dict[int, dict[Holder, tuple[Scalars, Ticket]]] = {}

    def add(
        self, holder: Holder, batch: int, scalars: Scalars, ticket: Ticket
    ) -> tuple[list[Scalars], list[Ticket]] | None:
        """Add one; if it was the last of its batch, return all of them in the order of the holders."""
        here = self._open.setdefault(batch, {})
        here[holder] = scalars, ticket
        if len(here) < len(self._holders):
            return None
        del self._open[batch]
        return [here[h][0] for h in self._holders], [ticket for _, ticket in here.values()]


class LocalControlReduce:
    """Control reduction among stages that are all in this process.

    Args:
        holders: the stages that contribute to every batch.
        add: adds their contributions.
    """

    def __init__(self, holders: Sequence[Holder], add: Add) -> None:
        self._rounds, self._add = _Rounds(holders), add

    def contribute(self, holder: Holder, batch: int, scalars: Scalars, ticket: Ticket) -> None:
        """Contribute the scalars of a stage; the last contribution of a batch completes all tickets."""
        complete = self._rounds.add(holder, batch, scalars, ticket)
        if complete is not None:
            contributions, tickets = complete
            total = self._add(contributions)
            for waiting in tickets:
                waiting.complete(total)

    def close(self) -> None:
        """Do nothing: there is no background thread."""


class GlooControlReduce:
    """Control reduction between processes over gloo; a background thread waits for the other processes.

    Args:
        holders: the stages that contribute, in all processes; the process of the first one adds.
        process: group rank of a holder's process.
        group: with gloo on the CPU; None for the default group.
        add: adds the contributions of a batch.
        tag: of the messages.
        timeout: how long the thread waits for the other processes; the time-out of the group if None.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        process: Callable[[Holder], int],
        group: dist.ProcessGroup | None,
        add: Add,
        tag: Tag = Tag.CONTROL,
        timeout: timedelta | None = None,
    ) -> None:
        self._messages, self._rank, self._add = TaggedGroup(group, tag, timeout), dist.get_rank(group), add
        self._counts = Counter(map(process, holders))
        self._root = process(holders[0]) if holders else 0
        self._rounds = _Rounds([holder for holder in holders if process(holder) == self._rank])
        self._background = Background(CONTROL_LANE)

    def contribute(self, holder: Holder, batch: int, scalars: Scalars, ticket: Ticket) -> None:
        """Contribute the scalars of a stage; communication begins when all stages of this process have done so."""
        complete = self._rounds.add(holder, batch, scalars, ticket)
        if complete is not None:
            contributions, tickets = complete
            communicate = self._reduce_and_broadcast if self._rank == self._root else self._send_and_receive
            self._background.later(tickets, partial(communicate, contributions))

    def close(self) -> None:
        """Let the thread end after everything that has been submitted."""
        self._background.close()

    def _reduce_and_broadcast(self, own: list[Scalars]) -> Scalars:
        """On the root: receive all contributions, add them, send the sum to every process."""
        others = {r: _empty(count, own[0]) for r, count in self._counts.items() if r != self._rank}
        self._messages.finish([self._messages.receive(block, r) for r, block in others.items()])
        total = self._add(own + [_like(own[0], row) for block in others.values() for row in block.tolist()])
        answer = torch.tensor([total], dtype=torch.float64)
        self._messages.finish([self._messages.send(answer, r) for r in others])
        return total

    def _send_and_receive(self, own: list[Scalars]) -> Scalars:
        """On every other process: send the contributions to the root and receive the sum."""
        answer, contributions = _empty(1, own[0]), torch.tensor(own, dtype=torch.float64)
        arriving = self._messages.receive(answer, self._root)
        leaving = self._messages.send(contributions, self._root)
        self._messages.finish([leaving, arriving])
        return _like(own[0], answer[0].tolist())


def _empty(rows: int, like: Scalars) -> Tensor:
    return torch.empty(rows, len(like), dtype=torch.float64)


def _like(example: Scalars, values: Sequence[float]) -> Scalars:
    """Return values as a NamedTuple of the type of `example`."""
    kind: Any = type(example)
    made: Scalars = kind(*values)
    return made
