"""Reduce-scatter of gradients and all-gather of weights over stages that each own a shard of the same state.

The sum of a shard is made by its owner, who adds the numbers of all members in their order: the bits of the ordered
all-reduce (`penstock.comm.collective.all_reduce`), of which these two are the halves. For each of them (w - 1) / w of
the state travels, in and out. Both have a lane of their own, so that weights that a pass waits for do not queue behind
a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.in_pieces import AHEAD, PIECE, Piece, TransferPriority, cut, in_pieces, packed, unpack
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.tagged_group import Tag, TaggedGroup
from penstock.comm.core.ticket import Background, Ticket

_REDUCING, _GATHERING = "the reduction lane", "the lane of weight shards"

Shards = Sequence[Sequence[Tensor]]
"""By member, flat tensors over the memory of one member that hold the shard of another one, or its own."""


class ShardExchange(Protocol):
    """Adds shards at their owners, and gives all members the shards of all."""

    def scatter(self, members: Members, me: Holder, batch: int, shards: Shards) -> Ticket:
        """Join a reduce-scatter; the ticket is done when the own shard holds the sum. The rest keeps its content.

        Args:
            members: all stages that take part, in the order in which their tensors are added.
            me: the stage that joins.
            batch: the batch that the sum belongs to; members join batch by batch.
            shards: of the tensors of `me`, by member, the same sizes on all members.
        """
        ...

    def gather(self, members: Members, me: Holder, version: int, shards: Shards) -> Ticket:
        """Join an all-gather; the ticket is done when all shards hold what their owners have in them.

        Args:
            members, me, shards: as of `scatter`.
            version: the version of the weights; members join version by version.
        """
        ...

    def close(self) -> None:
        """Stop the background threads, if there are any, after everything that has been submitted."""
        ...


class LocalShards:
    """Shards of stages that are all in this process."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, Members, int], dict[Holder, tuple[Shards, Ticket]]] = {}

    def scatter(self, members: Members, me: Holder, batch: int, shards: Shards) -> Ticket:
        """Join a reduce-scatter; the last member to join computes the sums."""
        return self._join(_REDUCING, members, me, batch, shards, _add)

    def gather(self, members: Members, me: Holder, version: int, shards: Shards) -> Ticket:
        """Join an all-gather; the last member to join copies."""
        return self._join(_GATHERING, members, me, version, shards, _copy)

    def close(self) -> None:
        """Do nothing: there is no background thread."""

    @torch.no_grad()
    def _join(
        self,
        lane: str,
        members: Members,
        me: Holder,
        number: int,
        shards: Shards,
        act: Callable[[int, Sequence[Tensor]], None],
    ) -> Ticket:
        ticket = Ticket(f"{lane} ({number})")
        here = self._open.setdefault((lane, members, number), {})
        here[me] = shards, ticket
        if len(here) == len(members):
            del self._open[lane, members, number]
            for owner in range(len(members)):
                for tensors in zip(*(here[member][0][owner] for member in members), strict=True):
                    act(owner, tensors)
            for _, waiting in here.values():
                waiting.complete()
        return ticket


def _add(owner: int, tensors: Sequence[Tensor]) -> None:
    """Write the sum of all members' tensors into that of the owner."""
    total = tensors[0] if owner == 0 else tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    if owner:
        tensors[owner].copy_(total)


def _copy(owner: int, tensors: Sequence[Tensor]) -> None:
    """Copy the tensor of the owner into those of the others."""
    for place, tensor in enumerate(tensors):
        if place != owner:
            tensor.copy_(tensors[owner])


class GlooShards:
    """Shards of stages in different processes, over gloo, in background threads.

    Processes must join what they have in common in the same order.

    Args:
        process: group rank of a holder's process; each member has one of its own.
        group: with gloo on the CPU; None for the default group.
        priority: of the rank, whose messages between stages go before sums.
    """

    def __init__(
        self,
        process: Callable[[Holder], int],
        group: dist.ProcessGroup | None,
        priority: TransferPriority | None = None,
    ) -> None:
        self._process, self._priority = process, priority or TransferPriority()
        self._sums, self._weights = TaggedGroup(group, Tag.GRADIENTS), TaggedGroup(group, Tag.WEIGHT_SHARDS)
        self._reducing, self._gathering = Background(_REDUCING), Background(_GATHERING)

    def scatter(self, members: Members, me: Holder, batch: int, shards: Shards) -> Ticket:
        """Join a reduce-scatter; it begins at once."""
        ranks = [self._process(member) for member in members]
        ticket = Ticket(f"{_REDUCING} of ranks {', '.join(map(str, ranks))} (batch {batch})")
        self._reducing.later([ticket], partial(self._run, self._add, self._priority, ranks, members.index(me), shards))
        return ticket

    def gather(self, members: Members, me: Holder, version: int, shards: Shards) -> Ticket:
        """Join an all-gather; it begins at once."""
        ranks = [self._process(member) for member in members]
        ticket = Ticket(f"{_GATHERING} of ranks {', '.join(map(str, ranks))} (version {version})")
        self._gathering.later([ticket], partial(self._run, self._copy, None, ranks, members.index(me), shards))
        return ticket

    def close(self) -> None:
        """Let the threads end after everything that has been submitted."""
        for background in (self._reducing, self._gathering):
            background.close()

    @torch.no_grad()
    def _run(
        self,
        act: Callable[[list[Sequence[Tensor]], list[int], int], Piece],
        priority: TransferPriority | None,
        ranks: list[int],
        place: int,
        all_: Shards,
    ) -> None:
        """Run a piece of every shard at a time.

        Args:
            act: makes the sum, or the copies, of one piece.
            priority: of messages, where they go first.
            ranks: the process of each member.
            place: of this process among them.
            all_: the shards in the memory of this process.
        """
        size = max(PIECE // len(ranks), 1)
        groups = zip_longest(*(cut(shard, size) for shard in all_), fillvalue=())
        in_pieces((act(list(here), ranks, place) for here in groups), priority, AHEAD)

    def _add(self, groups: list[Sequence[Tensor]], ranks: list[int], place: int) -> Piece:
        """Write the sum of one piece of the own shard over all members there."""
        messages, own = self._sums, groups[place]
        others = [i for i in range(len(ranks)) if i != place]
        gone = [(packed(groups[i]), ranks[i]) for i in others if groups[i]]
        leaving = [messages.send(tensor, rank) for tensor, rank in gone]
        shares, arriving = {}, []
        if own:
            shares = {i: packed(own) if i == place else _empty(own) for i in range(len(ranks))}
            arriving = [messages.receive(shares[i], ranks[i]) for i in others]
        yield
        messages.finish(arriving)
        if own:
            total = shares.pop(0)
            for share in shares.values():
                total.add_(share)
            unpack(total, own)
        messages.finish(leaving)

    def _copy(self, groups: list[Sequence[Tensor]], ranks: list[int], place: int) -> Piece:
        """Give all members one piece of the own shard, and take theirs."""
        messages, others = self._weights, [i for i in range(len(ranks)) if i != place]
        taken = {i: groups[i][0] if len(groups[i]) == 1 else _empty(groups[i]) for i in others if groups[i]}
        arriving = [messages.receive(tensor, ranks[i]) for i, tensor in taken.items()]
        own = packed(groups[place]) if groups[place] else None
        leaving = [] if own is None else [messages.send(own, ranks[i]) for i in others]
        yield
        messages.finish(arriving)
        for i, tensor in taken.items():
            unpack(tensor, groups[i])
        messages.finish(leaving)


def _empty(group: Sequence[Tensor]) -> Tensor:
    """Return room for a group as one tensor."""
    return torch.empty(sum(tensor.numel() for tensor in group), dtype=group[0].dtype, device=group[0].device)
