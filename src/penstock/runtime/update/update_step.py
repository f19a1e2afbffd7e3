"""The updates of one rank: gradient sums, the decision of all stages, and the optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from penstock.comm.collective.all_reduce import Reducer
from penstock.comm.collective.control_reduce import CONTROL_LANE, ControlReduce
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.ticket import Ticket, Wait, after_all, wait_for
from penstock.comm.core.trace_recorder import Recorder
from penstock.runtime.update.decisions import Decisions
from penstock.runtime.update.gathers_and_reduce_scatters import Gathers
from penstock.schedule.ir.schedule import Op, Stage
from penstock.stage.blocks.loss import Loss
from penstock.stage.stage_runtime import StageRuntime
from penstock.timeline import Waiting
from penstock.weights.decision import Decision
from penstock.weights.memory.squared_norm import Squares

_OTHERS = {
    Op.REDUCE: "the other pipelines: to reduce",
    Op.TIE: "stages that share parameters: to add up",
    Op.DECIDE: "all stages: to decide on",
}


class Updates:
    """Runs the updates of one rank during one span. Batches are counted from the start of training.

    Args:
        pipeline: which of the parallel pipelines.
        holders: by stage index, the copies of that stage in all parallel pipelines.
        reducer: adds gradients.
        tying: adds those of parameters that stages share.
        control: adds what stages know.
        decisions: this rank's part in them.
        recorder: takes down what happens.
        provisional: updates do not wait for decisions.
        gathers: where updates are sharded, completes what they have written, and adds gradients where those are sharded
            as well; None where all holders update everything.
    """

    def __init__(
        self,
        pipeline: int,
        holders: Mapping[int, tuple[Holder, ...]],
        reducer: Reducer,
        tying: TiedGradients,
        control: ControlReduce,
        decisions: Decisions,
        recorder: Recorder,
        provisional: bool,
        gathers: Gathers | None = None,
    ) -> None:
        self.provisional, self.gathers = provisional, gathers
        self._pipelines = len({holder.pipeline for holder in holders[0]})
        self._pipeline, self._holders = pipeline, holders
        self._reducer, self._tying, self._control = reducer, tying, control
        self._decisions, self._recorder = decisions, recorder
        self._sums: dict[tuple[Stage, int], list[tuple[Op, Ticket]]] = {}
        self._votes: dict[tuple[Stage, int], Ticket] = {}
        self._squares: dict[tuple[Stage, int], Ticket] = {}  # of gradients that may change before the vote is over

    @property
    def summing(self) -> bool:
        """Whether sums of gradients, or gathers of what was updated from them, may be under way."""
        return self.gathers is not None or any(not t.done for sums in self._sums.values() for _, t in sums)

    def reduce(self, stage: StageRuntime, batch: int) -> None:
        """Begin to add the gradient of a batch to those of all that hold the same weights."""
        members, me = self._holders[stage.key.index], Holder(self._pipeline, stage.key)
        if self.gathers is not None and self.gathers.splits_gradients:
            ticket = self.gathers.reduce(stage, batch)
        else:
            ticket = self._reducer.reduce(members, me, batch, stage.weights.gradient(batch))
        self._sums.setdefault((stage.key, batch), []).append((Op.REDUCE, ticket))

    def tie(self, stage: StageRuntime, batch: int) -> None:
        """Begin to add the gradients of parameters that this stage shares with others."""
        sums = self._sums.setdefault((stage.key, batch), [])
        sums.append((Op.TIE, self._tying.join(stage, batch, [ticket for _, ticket in sums])))

    def contribute(self, stage: StageRuntime, batch: int, loss: Loss | None) -> None:
        """Contribute what a stage knows of a batch, as soon as its gradient has been added over all copies.

        Args:
            stage: whose share.
            batch: of which.
            loss: of the batch on the last stage; None elsewhere.
        """
        me = Holder(self._pipeline, stage.key)
        first = me == self._holders[stage.key.index][0]  # the others hold the same gradient, or another shard of it
        counts = first or (self.gathers is not None and self.gathers.splits_gradients)
        before = [ticket for _, ticket in self._sums.get((stage.key, batch), ())]
        share = self._decisions.share(batch, loss)  # now: what is asked for meanwhile is for the next batch
        vote = self._votes[stage.key, batch] = Ticket(f"{CONTROL_LANE} of all stages (batch {batch})")
        taken = Ticket(f"the norm of stage {stage.key.name} (batch {batch})") if self.provisional else None
        if taken is not None:
            self._squares[stage.key, batch] = taken

        def act() -> None:
            failure = next((ticket.error for ticket in before if ticket.error is not None), None)
            if failure is not None:
                vote.complete(error=failure)
                if taken is not None:
                    taken.complete(error=failure)
                return
            try:
                squares = stage.weights.gradient_squares(batch) if counts else Squares()
                missing = first * stage.weights.counted - squares.elements
                if taken is not None:
                    taken.complete(stage.weights.all_squares(batch))
                full = share._replace(squares=squares.total, rest=squares.rest, missing=missing)
                self._control.contribute(me, batch, full, vote)
            except Exception as error:  # this may be the reducer's thread; the executor raises it where it waits
                vote.complete(error=error)
                if taken is not None and not taken.done:
                    taken.complete(error=error)

        after_all(before, act)

    def wait(self, stage: Stage, batch: int, action: Op, label: str) -> Iterator[Wait]:
        """Wait for what the update of a batch (STEP), or the decision on it (VALIDATE), needs from other ranks."""
        what, place = f"rank {self._recorder.rank}, stage {stage.name}, {label}", (stage.index, stage.direction, batch)
        tickets = list(self._sums.get((stage, batch), ())) if action is Op.STEP else []
        if (stage, batch) in self._votes and (action is Op.VALIDATE or not self.provisional):
            tickets.append((Op.DECIDE, self._votes[stage, batch]))
        for op, ticket in tickets:
            cause = f"{_OTHERS[op]} batch {batch}"
            yield from wait_for(self._recorder, ticket, what, cause, Waiting.CONTROL)
            start, end = ticket.made_at, ticket.done_at
            self._recorder.add("collective", start, end, op.value, f"{op}{batch}", *place)
        if action is Op.STEP and (stage, batch) in self._squares:
            cause = "the norm of its own gradient"
            yield from wait_for(self._recorder, self._squares[stage, batch], what, cause, Waiting.CONTROL)

    def step(self, stage: StageRuntime, batch: int, weight: float, keeps_old: bool) -> Decision:
        """Update a stage with a batch, or skip the update, once `wait` is over.

        Args:
            stage: whose.
            batch: which.
            weight: N, as far as this pipeline knows.
            keeps_old: the version before stays readable.
        """
        self._sums.pop((stage.key, batch), None)
        vote = self._votes.pop((stage.key, batch), None)
        decision = self._decisions.settle(batch, weight, vote.result if vote is not None else None)
        stage.weights.step(batch, decision.factor, keeps_old)
        stage.weights.decided(self._decisions.mean)
        return decision

    def try_step(self, stage: StageRuntime, batch: int, weight: float) -> None:
        """Update a stage before the decision of all stages, once `wait` is over.

        Args:
            stage: whose.
            batch: which.
            weight: N of this pipeline's part; the other pipelines' parts are taken to be the same.
        """
        self._sums.pop((stage.key, batch), None)
        factor = self._decisions.guess(batch, weight * self._pipelines)
        squares: float = self._squares.pop((stage.key, batch)).result
        stage.try_step(batch, 0.0 if self._decisions.surely_rejects(squares, factor) else factor)

    def rejects(self, stage: Stage, batch: int) -> bool:
        """Return whether the decision of all stages rejects the update that was made, once `wait` is over."""
        return self._decisions.validate(batch, self._votes[stage, batch].result).again

    def validate(self, stage: StageRuntime, batch: int) -> Decision:
        """Settle a provisional update: make it again if it was rejected."""
        decision = self._decisions.validate(batch, self._votes.pop((stage.key, batch)).result)
        stage.settle_step(batch, decision)
        stage.weights.decided(self._decisions.mean)
        return decision


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
