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
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.background import Background
from penstock.runtime.transport import Ticket
from penstock.schedule.ir import Node

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


class Holder(NamedTuple):
    """A node of one of the parallel pipelines."""

    replica: int
    node: Node


Members = tuple[Holder, ...]


class Reducer(Protocol):
    """Adds up tensors of several holders, in place."""

    def reduce(
        self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor], after: Ticket | None = None
    ) -> Ticket:
        """Join a sum; the ticket is done when the tensors hold it.

        Args:
            members: all that join it, in the order in which they are added.
            me: who joins.
            batch: to which it belongs; members join batch by batch.
            tensors: of the same shapes at all members.
            after: an earlier sum of (some of) the same tensors, that must be done before.
        """
        ...

    def close(self) -> None:
        """Stop whatever runs in the background, once all it was given is done."""
        ...


class LocalReducer:
    """All holders in one process."""

    def __init__(self) -> None:
        self._open: dict[tuple[Members, int], dict[Holder, tuple[Sequence[Tensor], Ticket]]] = {}

    def reduce(
        self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor], after: Ticket | None = None
    ) -> Ticket:
        """Join a sum; the last member to do so adds."""
        ticket = Ticket(f"{_LANE} (batch {batch})")

        def join() -> None:
            here = self._open.setdefault((members, batch), {})
            here[me] = tensors, ticket
            if len(here) < len(members):
                return
            del self._open[members, batch]
            _add([here[member][0] for member in members])
            for _, waiting in here.values():
                waiting.complete()

        if after is None:
            join()
        else:
            after.then(join)
        return ticket

    def close(self) -> None:
        """Nothing runs in the background."""


class GlooReducer:
    """One process's part, with a thread that adds.

    Args:
        process: group rank of a holder's process.
        group: with gloo on the CPU; None for the default group.
        fast: groups that add the fast way, by the ranks of their members; whatever has none is added in order.
    """

    def __init__(
        self,
        process: Callable[[Holder], int],
        group: dist.ProcessGroup | None,
        fast: Mapping[frozenset[int], dist.ProcessGroup],
    ) -> None:
        self._process, self._group, self._fast = process, group, fast
        self._background = Background(_LANE)

    def reduce(
        self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor], after: Ticket | None = None
    ) -> Ticket:
        """Join a sum; what it comes after is done by then, because one thread does all of them in their order."""
        ranks, place = [self._process(m) for m in members], members.index(me)
        fast = self._fast.get(frozenset(ranks))
        ticket = Ticket(f"{_LANE} of ranks {', '.join(map(str, ranks))} (batch {batch})")

        @torch.no_grad()
        def add() -> None:
            if after is not None:
                after.check("adding gradients")
            for tensor in tensors:
                if fast is not None:
                    dist.all_reduce(tensor, group=fast)
                    continue
                for piece in torch.split(tensor.reshape(-1), _PIECE):
                    self._add(piece, ranks, place)

        self._background.later([ticket], add)
        return ticket

    def close(self) -> None:
        """Let the thread end once all it was given is done."""
        self._background.close()

    def _add(self, piece: Tensor, ranks: list[int], place: int) -> None:
        """Replace a piece by its sum over all members."""
        parts = list(piece.tensor_split(len(ranks)))
        mine = parts[place]
        shares = [mine if i == place else torch.empty_like(mine) for i in range(len(ranks))]
        arriving = [self._receive(shares[i], r) for i, r in enumerate(ranks) if i != place]
        leaving = [self._send(parts[i], r) for i, r in enumerate(ranks) if i != place]
        _finish(arriving)
        total = shares[0]
        for share in shares[1:]:
            total.add_(share)
        mine.copy_(total)
        _finish(leaving)
        arriving = [self._receive(parts[i], r) for i, r in enumerate(ranks) if i != place]
        leaving = [self._send(mine, r) for i, r in enumerate(ranks) if i != place]
        _finish(arriving)
        _finish(leaving)

    def _send(self, tensor: Tensor, rank: int) -> Any:
        return dist.isend(tensor, group=self._group, tag=_TAG, group_dst=rank) if tensor.numel() else None

    def _receive(self, tensor: Tensor, rank: int) -> Any:
        return dist.irecv(tensor, group=self._group, tag=_TAG, group_src=rank) if tensor.numel() else None


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
