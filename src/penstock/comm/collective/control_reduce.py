"""Asynchronous all-reduce of a few scalars per batch (loss, weight, gradient norm, stop request) over all stages.

Contributions go up a tree to the rank of the first stage, whose last backward ends a batch, and the sum comes back
down: with up to nine processes two hops after the last contribution, on messages of their own, which queue behind
nothing. They are added at the top, in the order of the stages, so that the sum does not depend on where stages are. A
thread communicates while the rank continues to compute. The caller defines what the scalars mean and how they are
added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.comm.core.ticket import Background, Ticket

CONTROL_LANE = "the control lane"
FAN = 8
"""The most processes that send to one: few enough for its thread, and trees of thousands are four hops high."""


Scalars = tuple[Any, ...]
"""A NamedTuple of floats, or of tuples of floats; all contributions to a sum have the same type and lengths."""

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
        held: dict[int, list[int]] = {}  # process -> which of the holders it has; a tree in the order of the holders
        for index, holder in enumerate(holders):
            held.setdefault(process(holder), []).append(index)
        places = list(held)
        mine = places.index(self._rank) if self._rank in held else 0
        self._parent = places[(mine - 1) // FAN] if mine else None
        below = [_subtree(child, len(places)) for child in _children(mine, len(places))]
        self._children = [(places[part[0]], sum(len(held[places[i]]) for i in part)) for part in below]
        top = _subtree(0, len(places)) if places else []  # evaluations decide nothing
        rows = [index for i in top for index in held[places[i]]]  # as they come to the top
        self._order = sorted(range(len(rows)), key=rows.__getitem__)
        self._rounds = _Rounds([holder for holder in holders if process(holder) == self._rank])
        self._background = Background(CONTROL_LANE)

    def contribute(self, holder: Holder, batch: int, scalars: Scalars, ticket: Ticket) -> None:
        """Contribute the scalars of a stage; communication begins when all stages of this process have done so."""
        complete = self._rounds.add(holder, batch, scalars, ticket)
        if complete is not None:
            contributions, tickets = complete
            self._background.later(tickets, partial(self._reduce_and_broadcast, contributions))

    def close(self) -> None:
        """Let the thread end after everything that has been submitted."""
        self._background.close()

    def _reduce_and_broadcast(self, own: list[Scalars]) -> Scalars:
        """Send the contributions of this process and those below it up, and the sum down."""
        messages, answer = self._messages, _empty(1, own[0])
        blocks = [(rank, _empty(rows, own[0])) for rank, rows in self._children]
        above = [] if self._parent is None else [messages.receive(answer, self._parent)]
        messages.finish([messages.receive(block, rank) for rank, block in blocks])
        rows = torch.cat(
            [torch.tensor([flat(row) for row in own], dtype=torch.float64), *(block for _, block in blocks)]
        )
        if self._parent is None:
            arrived = rows.tolist()
            total = self._add([_like(own[0], arrived[row]) for row in self._order])
            answer = torch.tensor([flat(total)], dtype=torch.float64)
        else:
            messages.finish([messages.send(rows, self._parent), *above])
        messages.finish([messages.send(answer, rank) for rank, _ in blocks])
        return _like(own[0], answer[0].tolist())


def _children(place: int, count: int) -> range:
    """Return the places below one in a tree of so many, which are numbered level by level."""
    return range(min(FAN * place + 1, count), min(FAN * place + FAN + 1, count))


def _subtree(place: int, count: int) -> list[int]:
    """Return a place and all below it, in the order in which their rows are sent up."""
    return [place, *(i for child in _children(place, count) for i in _subtree(child, count))]


def _empty(rows: int, like: Scalars) -> Tensor:
    return torch.empty(rows, len(flat(like)), dtype=torch.float64)


def flat(scalars: Scalars) -> list[float]:
    """Return the numbers of one contribution, in a row."""
    return [each for value in scalars for each in (value if isinstance(value, tuple) else (value,))]


def _like(example: Scalars, values: Sequence[float]) -> Scalars:
    """Return values as a NamedTuple of the type of `example`."""
    kind: Any = type(example)
    rest = iter(values)
    made: Scalars = kind(*(tuple(islice(rest, len(v))) if isinstance(v, tuple) else next(rest) for v in example))
    return made
