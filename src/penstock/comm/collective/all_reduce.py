"""Asynchronous all-reduce of gradients over the stages that hold the same weights.

Ordered: every member adds the same numbers in the same order, that of the members, so that all ranks, and all ways to
place them on processes, get the same bits. The tensors are reduced in pieces, each by a reduce-scatter and an
all-gather: twice the gradient travels, whatever the number of members, and the extra memory is that of a few pieces.
Messages between stages go first (`penstock.comm.collective.in_pieces`).

Fast: torch's all_reduce, which adds in an order of its own. With gloo all members still get the same bits, it needs
hardly any extra memory, and a sum of two members equals the ordered one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.in_pieces import AHEAD, PIECE, Piece, TransferPriority, cut, in_pieces, packed, unpack
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.comm.core.ticket import Background, Ticket
from penstock.errors import ConfigError

_SUMS = {
    Tag.GRADIENTS: Tag.GRADIENT_SUMS,
    Tag.TIED_GRADIENTS: Tag.TIED_GRADIENT_SUMS,
    Tag.AVERAGES: Tag.AVERAGE_SUMS,
}  # parts travel under the first tag, their sums under the second, as ranks need not be equally far ahead
_LANE = "the reduction lane"

Reduce = Literal["ordered", "fast"]


def is_fast(reduce: Reduce) -> bool:
    """Return True for torch's all_reduce, False for the ordered sum.

    Raises:
        ConfigError: `reduce` is neither "ordered" nor "fast".
    """
    if reduce not in get_args(Reduce):
        raise ConfigError(f"reduce must be one of {', '.join(get_args(Reduce))}; got {reduce!r}")
    return reduce == "fast"


class Reducer(Protocol):
    """Adds tensors of several stages in place."""

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:
        """Join an all-reduce; the ticket is done when the tensors hold the sums.

        Args:
            members: all stages that take part, in the order in which their tensors are added.
            me: the stage that joins.
            batch: the batch that the sum belongs to; members join batch by batch.
            tensors: of the same shapes on all members.
        """
        ...

    def close(self) -> None:
        """Stop the background thread, if there is one, after everything that has been submitted."""
        ...


class LocalReducer:
    """All-reduce among stages that are all in this process."""

    def __init__(self) -> None:
        self._open: dict[tuple[Members, int], dict[Holder, tuple[Sequence[Tensor], Ticket]]] = {}

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:
        """Join an all-reduce; the last member to join computes the sums."""
        ticket = Ticket(f"{_LANE} (batch {batch})")
        here = self._open.setdefault((members, batch), {})
        here[me] = tensors, ticket
        if len(here) == len(members):
            del self._open[members, batch]
            _add([here[member][0] for member in members])
            for _, waiting in here.values():
                waiting.complete()
        return ticket

    def close(self) -> None:
        """Do nothing: there is no background thread."""


class GlooReducer:
    """All-reduce between processes over gloo, in a background thread.

    Processes must join the sums that they have in common in the same order.

    Args:
        process: group rank of a holder's process.
        group: with gloo on the CPU; None for the default group.
        fast: ranks of the members -> the group for torch's all_reduce; members without one use the ordered sum.
        tag: of the messages.
        priority: of the rank, whose messages between stages go first.
    """

    def __init__(
        self,
        process: Callable[[Holder], int],
        group: dist.ProcessGroup | None,
        fast: Mapping[frozenset[int], dist.ProcessGroup],
        tag: Tag = Tag.GRADIENTS,
        priority: TransferPriority | None = None,
    ) -> None:
        self._process, self._fast, self._priority = process, fast, priority or TransferPriority()
        self._parts, self._sums = TaggedGroup(group, tag), TaggedGroup(group, _SUMS[tag])
        self._open: dict[tuple[Members, int], dict[int, tuple[Sequence[Tensor], Ticket]]] = {}
        self._background = Background(_LANE)

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:
        """Join an all-reduce; it begins when all members in this process have joined."""
        ranks, own = [self._process(m) for m in members], self._process(me)
        ticket = Ticket(f"{_LANE} of ranks {', '.join(map(str, ranks))} (batch {batch})")
        here = self._open.setdefault((members, batch), {})
        here[members.index(me)] = tensors, ticket
        if len(here) == ranks.count(own):
            del self._open[members, batch]
            given = {place: here[place][0] for place in sorted(here)}
            self._background.later([waiting for _, waiting in here.values()], partial(self._sum, ranks, own, given))
        return ticket

    def close(self) -> None:
        """Let the thread end after everything that has been submitted."""
        self._background.close()

    @torch.no_grad()
    def _sum(self, ranks: list[int], own: int, given: Mapping[int, Sequence[Tensor]]) -> None:
        """Replace the tensors of this process's members by the sums over all members.

        Args:
            ranks: the process of each member.
            own: the rank of this process.
            given: position among the members -> tensors, of this process's members.
        """
        fast = self._fast.get(frozenset(ranks)) if len(set(ranks)) == len(ranks) else None
        if fast is not None:
            for tensor in next(iter(given.values())):
                dist.all_reduce(tensor, group=fast)
            return

        def pieces() -> Iterator[Piece]:
            flat = ([tensor.reshape(-1) for tensor in tensors] for tensors in given.values())
            for groups in zip(*(cut(tensors, PIECE) for tensors in flat), strict=True):
                yield self._add(dict(zip(given, groups, strict=True)), ranks, own)

        in_pieces(pieces(), self._priority, AHEAD)

    def _add(self, groups: Mapping[int, Sequence[Tensor]], ranks: list[int], own: int) -> Piece:
        """Replace one piece of the tensors of this process's members by the sum over all members.

        The parts for other processes are on their way at the first stop, the sum of the own part at the second.
        """
        adders = list(dict.fromkeys(ranks))  # each process adds a part
        messages, sums = self._parts, self._sums
        pieces = {place: packed(group) for place, group in groups.items()}
        parts = {place: piece.tensor_split(len(adders)) for place, piece in pieces.items()}
        first, mine = next(iter(parts.values())), adders.index(own)
        others = [(i, rank) for i, rank in enumerate(adders) if rank != own]
        shares = [parts[i][mine] if i in parts else torch.empty_like(first[mine]) for i in range(len(ranks))]
        arriving = [messages.receive(shares[i], rank) for i, rank in enumerate(ranks) if i not in parts]
        leaving = [messages.send(part[i], rank) for i, rank in others for part in parts.values()]
        yield
        messages.finish(arriving)
        total = shares[0]
        for share in shares[1:]:
            total.add_(share)
        first[mine].copy_(total)
        messages.finish(leaving)
        arriving = [sums.receive(first[i], rank) for i, rank in others]
        leaving = [sums.send(first[mine], rank) for _, rank in others]
        yield
        sums.finish(arriving)
        sums.finish(leaving)
        whole = next(iter(pieces.values()))
        for group in groups.values():
            unpack(whole, group)


def _add(tensors: Sequence[Sequence[Tensor]]) -> None:
    """Replace the tensors of all members by their sums."""
    with torch.no_grad():
        for total, *others in zip(*tensors, strict=True):
            for other in others:
                total.add_(other)
            for other in others:
                other.copy_(total)
