"""Sums of the gradients of tied parameters, while the passes go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from penstock.comm.collective.all_reduce import Reducer
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.ticket import Ticket, after_all
from penstock.schedule.ir.schedule import Stage
from penstock.stage.stage_runtime import StageRuntime


class _Share(NamedTuple):
    """A stage that contributes gradients to the sums of a batch."""

    stage: StageRuntime
    before: Sequence[Ticket]
    ticket: Ticket


class TiedGradients:
    """Adds the gradients of tied parameters on one rank during one span.

    The sums of a batch begin when all stages of the rank that share something have joined, in one order on all ranks: a
    rank that holds several of them (chunks, or both directions) may have come to them in another order than its peers.
    The proof of the schedule takes no less for granted: there a TIE is one action of all stages together.

    Args:
        pipeline: which of the parallel pipelines.
        holders: by stage index, the copies of that stage in all parallel pipelines.
        reducer: adds them, and nothing else.
        stages: of this rank that share something.
    """

    def __init__(self, pipeline: int, holders: Mapping[int, tuple[Holder, ...]], reducer: Reducer, stages: int) -> None:
        self._pipeline, self._holders, self._reducer, self._stages = pipeline, holders, reducer, stages
        self._joined: dict[int, list[_Share]] = {}

    def join(self, stage: StageRuntime, batch: int, before: Sequence[Ticket]) -> Ticket:
        """Join the sums of a batch; the ticket is done when all of this stage's are.

        Args:
            stage: which stage.
            batch: stages join batch by batch.
            before: earlier sums of its gradient.
        """
        ticket = Ticket(f"the reduction lane of stages that share parameters (batch {batch})")
        shares = self._joined.setdefault(batch, [])
        shares.append(_Share(stage, before, ticket))
        if len(shares) == self._stages:
            del self._joined[batch]
            earlier = [waiting for share in shares for waiting in share.before]
            after_all(earlier, lambda: self._add(shares, batch, earlier))
        return ticket

    def _add(self, shares: Sequence[_Share], batch: int, before: Sequence[Ticket]) -> None:
        """Begin the sums, unless an earlier one has failed."""
        sums: dict[Stage, list[Ticket]] = {
            share.stage.key: [ticket for ticket in before if ticket.error] for share in shares
        }
        if not any(sums.values()):
            parts = [(tie, share.stage) for share in shares for tie in share.stage.ties]
            for tie, runtime in sorted(parts, key=lambda part: (part[0].stages, part[1].key.direction)):
                stage = runtime.key
                tensors = runtime.weights.gradients_of(batch, tie.names_at(stage.index))  # now: sums may have moved
                all_holders = [h for index in tie.stages for h in self._holders[index]]
                members = [
                    h for h in all_holders if (h.pipeline, h.stage.direction) == (self._pipeline, stage.direction)
                ]
                me = Holder(self._pipeline, stage)
                sums[stage].append(self._reducer.reduce(tuple(members), me, batch, tensors))
        for share in shares:
            after_all(sums[share.stage.key], partial(_settle, share.ticket, sums[share.stage.key]))


def _settle(ticket: Ticket, parts: Sequence[Ticket]) -> None:
    """All parts are done, or one has failed."""
    ticket.complete(error=next((part.error for part in parts if part.error is not None), None))
