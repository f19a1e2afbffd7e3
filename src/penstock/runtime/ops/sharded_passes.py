"""Passes where state is sharded: they wait until their weights are whole, backwards also for room for a gradient."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.comm.core.ticket import Wait
from penstock.runtime.ops.messages import Consumer
from penstock.runtime.ops.passes import Backward, RecomputeForward, TrainingForward, WeightBackward
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.ir.schedule import Op
from penstock.schedule.machine.instructions import Instruction

_ADDING = (Op.B, Op.I, Op.W)


class _Held(Consumer):
    """A pass of a trained stage: it waits until its weights are whole and, if it adds to a gradient, there is room."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        assert span.updates.gathers is not None, "only sharded schedules hold passes up"
        self._gathers, self._adds = span.updates.gathers, self.op in _ADDING

    def run(self, t: int) -> Iterator[Wait] | None:
        """Run it at once where everything is there."""
        if self._gathers.ready(self.action.stage, self._version(t), self._batch(t)):
            return super().run(t)
        return self._run_held(t)

    def _run_held(self, t: int) -> Iterator[Wait]:
        turn, version = self.turn(t), self._version(t)
        yield from self._span.complete(self.stage, str(turn), version)
        yield from self._gathers.before_pass(self.action.stage, version, self._batch(t), turn)
        yield from super().run(t) or ()

    def _version(self, t: int) -> int:
        return self._span.start + max(self._versions[0] + t, self._span.older)

    def _batch(self, t: int) -> int | None:
        return self._span.start + t + self._offset if self._adds else None


class HeldForward(_Held, TrainingForward):
    """A forward that a backward follows."""


class HeldBackward(_Held, Backward):
    """A backward, or its first half."""


class HeldWeightBackward(_Held, WeightBackward):
    """The second half of a backward."""


class HeldRecomputeForward(_Held, RecomputeForward):
    """A forward again."""
