"""Stand-ins for parallel pipelines that are not there: sums and gathers that end at once, for a pipeline by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.comm.collective.shard_exchange import Shards
from penstock.comm.core.rank_grid import Holder, Members
from penstock.comm.core.ticket import Ticket

_WEIGHT = 0.02  # of parameters that others own; any number that keeps activations finite does


class ReducerAlone:
    """All-reduces in which nobody else takes part, so the tensors keep what they hold."""

    def reduce(self, members: Members, me: Holder, batch: int, tensors: Sequence[Tensor]) -> Ticket:  # noqa: ARG002
        """Return a ticket that is done."""
        return _done(f"no sum (batch {batch})")

    def close(self) -> None:
        """Do nothing: there is no background thread."""


class ShardsAlone:
    """Reduce-scatters and all-gathers in which nobody else takes part."""

    def scatter(self, members: Members, me: Holder, batch: int, shards: Shards) -> Ticket:  # noqa: ARG002
        """Return a ticket that is done; the own shard keeps what it holds."""
        return _done(f"no sum (batch {batch})")

    @torch.no_grad()
    def gather(self, members: Members, me: Holder, version: int, shards: Shards) -> Ticket:
        """Write some weights into the shards of others, and return a ticket that is done."""
        for member, tensors in zip(members, shards, strict=True):
            for tensor in tensors if member != me else ():
                tensor.fill_(_WEIGHT)
        return _done(f"no weights (version {version})")

    def close(self) -> None:
        """Do nothing: there is no background thread."""


def _done(where: str) -> Ticket:
    ticket = Ticket(where)
    ticket.complete()
    return ticket
