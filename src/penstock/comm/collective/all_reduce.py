"""Sums of gradients over all that hold the same weights, while the passes go on.

Ordered: every member adds the same numbers in the same order, that of the members, so that all end with the same bits,
and with those of any other way of running. A piece at a time, each member adds up its part of the piece and sends the
sum to the others: twice the gradient travels, whatever the number of members, and the memory it takes is that of a few
pieces.

Fast: torch's all_reduce, whose order of adding is its own. gloo's gives all members the same bits, too, and takes no
memory worth mentioning; two numbers have the same sum in either order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.core.background import Background
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.ticket import Ticket
from penstock.errors import ConfigError

_TAG = 9  # on the pipelines' group; lanes use others
_PIECE = 1 << 20  # elements that are summed at once
_LANE = "the reduction lane"

Reduce = Literal["ordered", "fast"]


def is_fast(reduce: Reduce) -> bool:
    """Whether torch adds gradients, in an order of its own.

    Raises:
        ConfigError: unknown way.
    """
    if reduce not in get_args(Reduce):
        raise ConfigError(f"reduce must be one of {', '.join(get_args(Reduce))}; got {reduce!r}")
    return reduce == "fast"


class Reducer(Protocol):
    """Adds up tensors of several holders, in place."""

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:
        """Join a sum; the ticket is done when the tensors hold it.

        Args:
            members: all that join it, in the order in which they are added.
            me: who joins.
            batch: to which it belongs; members join batch by batch.
            tensors: of the same shapes at all members.
        """
        ...

    def close(self) -> None:
        """Stop whatever runs in the background, once all it was given is done."""
        ...


class LocalReducer:
    """All holders in one process."""

    def __init__(self) -> None:
        self._open: dict[tuple[Members, int], dict[Holder, tuple[Sequence[Tensor], Ticket]]] = {}

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:
        """Join a sum; the last member to do so adds."""
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
        """Nothing runs in the background."""


class GlooReducer:
    """One process's part, with a thread that adds: all processes must join the sums that they share in one order.

    Args:
        process: group rank of a holder's process.
        group: with gloo on the CPU; None for the default group.
        fast: groups that add the fast way, by the ranks of their members; whatever has none is added in order.
        tag: of its messages.
    """

    def __init__(
        self,
        process: Callable[[Holder], int],
        group: dist.ProcessGroup | None,
        fast: Mapping[frozenset[int], dist.ProcessGroup],
        tag: int = _TAG,
    ) -> None:
        self._process, self._group, self._fast, self._tag = process, group, fast, tag
        self._open: dict[tuple[Members, int], dict[int, tuple[Sequence[Tensor], Ticket]]] = {}
        self._background = Background(_LANE)

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:
        """Join a sum; it begins when all members in this process have."""
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
        """Let the thread end once all it was given is done."""
        self._background.close()

    @torch.no_grad()
    def _sum(self, ranks: list[int], own: int, given: Mapping[int, Sequence[Tensor]]) -> None:
        """Replace what the members here have given, by their places, by the sums over all members."""
        fast = self._fast.get(frozenset(ranks)) if len(set(ranks)) == len(ranks) else None
        for tensors in zip(*given.values(), strict=True):
            if fast is not None:
                dist.all_reduce(tensors[0], group=fast)
                continue
            for pieces in zip(*(torch.split(tensor.reshape(-1), _PIECE) for tensor in tensors), strict=True):
                self._add(dict(zip(given, pieces, strict=True)), ranks, own)

    def _add(self, pieces: Mapping[int, Tensor], ranks: list[int], own: int) -> None:
        """Replace the pieces of the members here, by their places, by the sum over all members."""
        adders = list(dict.fromkeys(ranks))  # each process adds a part
        parts = {place: piece.tensor_split(len(adders)) for place, piece in pieces.items()}
        first, mine = next(iter(parts.values())), adders.index(own)
        others = [(i, rank) for i, rank in enumerate(adders) if rank != own]
        shares = [parts[i][mine] if i in parts else torch.empty_like(first[mine]) for i in range(len(ranks))]
        arriving = [self._receive(shares[i], rank) for i, rank in enumerate(ranks) if i not in parts]
        leaving = [self._send(part[i], rank) for i, rank in others for part in parts.values()]
        _finish(arriving)
        total = shares[0]
        for share in shares[1:]:
            total.add_(share)
        first[mine].copy_(total)
        _finish(leaving)
        arriving = [self._receive(first[i], rank) for i, rank in others]
        leaving = [self._send(first[mine], rank) for _, rank in others]
        _finish(arriving)
        _finish(leaving)
        whole, *copies = pieces.values()
        for copy in copies:
            copy.copy_(whole)

    def _send(self, tensor: Tensor, rank: int) -> Any:
        return dist.isend(tensor, group=self._group, tag=self._tag, group_dst=rank) if tensor.numel() else None

    def _receive(self, tensor: Tensor, rank: int) -> Any:
        return dist.irecv(tensor, group=self._group, tag=self._tag, group_src=rank) if tensor.numel() else None


def _add(tensors: Sequence[Sequence[Tensor]]) -> None:
    """Replace the tensors of all members by their sums."""
    with torch.no_grad():
        for total, *others in zip(*tensors, strict=True):
            for other in others:
                total.add_(other)
            for other in others:
                other.copy_(total)


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
