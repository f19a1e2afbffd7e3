"""Sums of the gradients of parameters that stages share (`ties.py`), while the passes go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from penstock.comm.collective.all_reduce import Reducer
from penstock.comm.core.ranks import Holder
from penstock.comm.core.ticket import Ticket, after_all
from penstock.partition.tied import Tie
from penstock.schedule.ir.schedule import Node
from penstock.stage.node import NodeRuntime


class _Share(NamedTuple):
    """What a stage brings to the sums of a batch."""

    node: Node
    gradients: list[tuple[Tie, list[Tensor]]]
    before: Sequence[Ticket]
    ticket: Ticket


class Tying:
    """Of one rank, for one span.

    The sums of a batch begin when all stages of the rank that share something have joined, in one order on all ranks: a
    rank that holds several of them (chunks, or both directions) may have come to them in another order than its peers.
    The proof of the schedule takes no less for granted: there a TIE is one action of all stages together.

    Args:
        replica: which of the parallel pipelines.
        holders: of each cut, all nodes of all parallel pipelines that hold it.
        reducer: adds them, and nothing else.
        stages: of this rank that share something.
    """

    def __init__(self, replica: int, holders: Mapping[int, tuple[Holder, ...]], reducer: Reducer, stages: int) -> None:
        self._replica, self._holders, self._reducer, self._stages = replica, holders, reducer, stages
        self._joined: dict[int, list[_Share]] = {}

    def join(self, node: NodeRuntime, batch: int, before: Sequence[Ticket]) -> Ticket:
        """Join the sums of a batch; the ticket is done when all of this stage's are.

        Args:
            node: which stage.
            batch: stages join batch by batch.
            before: earlier sums of its gradient.
        """
        ticket = Ticket(f"the reduction lane of stages that share parameters (batch {batch})")
        gradients = [(tie, node.gradients_of(batch, tie.names_at(node.node.cut))) for tie in node.ties]
        shares = self._joined.setdefault(batch, [])
        shares.append(_Share(node.node, gradients, before, ticket))
        if len(shares) == self._stages:
            del self._joined[batch]
            earlier = [waiting for share in shares for waiting in share.before]
            after_all(earlier, lambda: self._add(shares, batch, earlier))
        return ticket

    def _add(self, shares: Sequence[_Share], batch: int, before: Sequence[Ticket]) -> None:
        """Begin the sums, unless an earlier one has failed."""
        sums: dict[Node, list[Ticket]] = {share.node: [ticket for ticket in before if ticket.error] for share in shares}
        if not any(sums.values()):
            parts = [(tie, share.node, tensors) for share in shares for tie, tensors in share.gradients]
            for tie, node, tensors in sorted(parts, key=lambda part: (part[0].cuts, part[1].replica)):
                all_holders = [h for cut in tie.cuts for h in self._holders[cut]]
                members = [h for h in all_holders if (h.replica, h.node.replica) == (self._replica, node.replica)]
                me = Holder(self._replica, node)
                sums[node].append(self._reducer.reduce(tuple(members), me, batch, tensors))
        for share in shares:
            after_all(sums[share.node], partial(_settle, share.ticket, sums[share.node]))


def _settle(ticket: Ticket, parts: Sequence[Ticket]) -> None:
    """All parts are done, or one has failed."""
    ticket.complete(error=next((part.error for part in parts if part.error is not None), None))
