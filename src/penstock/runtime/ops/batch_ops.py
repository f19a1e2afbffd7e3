"""Actions on whole batches: REDUCE, TIE, DECIDE, STEP, GATHER, RELEASE and AVERAGE."""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.comm.core.ticket import Wait
from penstock.runtime.ops.bound import BoundAction, Turn
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.machine.instructions import Instruction


class ReduceAction(BoundAction):
    """Begins to add the gradient of a batch over all that hold the same weights."""

    def work(self, turn: Turn) -> None:
        """Begin."""
        self._span.updates.reduce(self._runtime, turn.batch)


class TieAction(BoundAction):
    """Begins to add the gradients of parameters that several stages share."""

    def work(self, turn: Turn) -> None:
        """Begin."""
        self._span.updates.tie(self._runtime, turn.batch)


class DecideAction(BoundAction):
    """Contributes what a stage knows of a batch to the decision of all stages."""

    def work(self, turn: Turn) -> None:
        """Contribute."""
        span = self._span
        loss = span.losses.share(turn.batch) if self.stage.is_last else None
        span.updates.contribute(self._runtime, turn.batch, loss)
        span.meetings.contribute(self.action.stage, turn.batch, loss is not None)


class StepAction(BoundAction):
    """The optimizer update, once everything that it needs of others is there."""

    def run(self, t: int) -> Iterator[Wait]:
        """Wait for sums and decisions, then update."""
        turn, updates = self.turn(t), self._span.updates
        yield from self._span.complete(self.stage, str(turn))  # what this update begins from
        yield from updates.wait(self.action.stage, turn.batch, self.op, f"{self.op}{turn.first}")
        self._span.capture.before_update(self._runtime)
        self.act(turn)

    def work(self, turn: Turn) -> float | None:
        """Update, and take a snapshot if it is time."""
        span, batch, start = self._span, turn.batch, None
        settle = self._runtime.weights.settle_swap()
        if settle is not None:
            start = self._recorder.wait_on_device(settle, f"copy {turn.label}", *self._place, batch)
        weight = span.losses.weight_for_update(batch)
        decision = span.updates.step(self._runtime, batch, weight, self.stage.books.last.rotated)
        span.reports.decided(decision)
        gathers = span.updates.gathers
        final = (gathers is None or gathers.full) and not span.meetings.meets(batch)
        (span.capture.after_step if final else span.capture.keep_older)(self._runtime, batch + 1)
        return start


class ProvisionalStep(StepAction):
    """The optimizer update before the decision of all stages; VALIDATE settles it."""

    def work(self, turn: Turn) -> None:
        """Update by the factor that the decision would give if nothing were clipped and everything were finite."""
        self._span.updates.try_step(self._runtime, turn.batch, self._span.losses.weight_for_update(turn.batch))


class GatherAction(BoundAction):
    """Begins to make a version whole of which a shard is here; the first pass on it waits."""

    def work(self, turn: Turn) -> None:
        """Begin."""
        gathers = self._span.updates.gathers
        assert gathers is not None, "only sharded schedules have GATHERs"
        gathers.begin(self._runtime, turn.version)


class ReleaseAction(BoundAction):
    """Gives the memory of a gathered version back."""

    def work(self, turn: Turn) -> None:
        """Give it back."""
        self._runtime.release(turn.version)


class AverageAction(BoundAction):
    """The meeting of parallel pipelines that have weights of their own."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction._replace(action=span.meetings.placed(instruction.action)), span)
        self.settled = math.inf  # it depends on the batch

    def exists(self, t: int) -> bool:
        """Return whether pipelines meet in this period."""
        return super().exists(t) and self._span.meetings.meets(self._span.start + t + self._offset)

    def run(self, t: int) -> Iterator[Wait]:
        """Wait for the other pipelines, then go on with what they have agreed on."""
        turn = self.turn(t)
        yield from self._span.meetings.meet(self._runtime, turn.batch, f"{self.op}{turn.first}", self._span.hold_bytes)
        self.act(turn)

    def work(self, turn: Turn) -> None:
        """Change the newest version, and take a snapshot if it is time."""
        if self._span.meetings.end(self._runtime, turn.batch):
            self._span.stop.agree()
        self._span.capture.after_step(self._runtime, turn.batch + 1)


def bind_step(instruction: Instruction, span: RankSpan) -> StepAction:
    """The update that an instruction stands for."""
    return (ProvisionalStep if span.provisional else StepAction)(instruction, span)
