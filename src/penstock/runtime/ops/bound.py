"""Instructions of a rank, bound once to everything about them that is the same in every batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from penstock.comm.core.ticket import Wait
from penstock.runtime.rank.span import RankSpan
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.op_table import SWAPS
from penstock.schedule.ir.schedule import Copy, Kind, Op, Unit, format_unit
from penstock.schedule.machine.instructions import Instruction
from penstock.stage.trained_stage_weights import TrainedWeights

_PASSES = (Op.F, Op.B, Op.I, Op.W, Op.R)
STEPPING = "the optimizer step"
_NAMES = {
    Op.F: "the forward",
    Op.B: "the backward",
    Op.I: "the backward for inputs",
    Op.W: "the backward for weights",
    Op.R: "the recomputation",
    Op.STEP: STEPPING,
}


class ActionName(NamedTuple):
    """What an action is called in every batch.

    Attributes:
        where: rank and stage.
        name: of its operation.
        unit: that it handles in batch 0, unless it is one microbatch or a batch.
    """

    where: str
    name: str
    unit: Unit | None

    def label(self, first: int) -> str:
        """Its name in a batch, such as F3 or STEP[2]."""
        return f"{self.name}{first if self.unit is None else format_unit(self.unit._replace(first=first))}"


class Turn(NamedTuple):
    """An action of one batch, with all its numbers.

    Attributes:
        t: the period (or epilogue) that it belongs to, counted from the start of the span.
        first: its first microbatch, or its batch, counted from the start of the span.
        batch: its batch, counted from the start of training.
        version: the (first) version that it reads, counted from the start of training; -1 where it reads none.
        name: of the action.
    """

    t: int
    first: int
    batch: int
    version: int
    name: ActionName

    @property
    def label(self) -> str:
        """Its name, such as F3 or STEP[2], with numbers counted from the start of the span."""
        return self.name.label(self.first)

    def __str__(self) -> str:
        """Return rank, stage and name, for messages."""
        return f"{self.name.where}, {self.label}"


class Bound:
    """An instruction of one rank, bound to its handler, its stage and its relative numbers.

    Args:
        instruction: of the lowered program.
        span: the state of the rank.

    Attributes:
        op: its operation.
        ahead: a RECV for the next batch; it is left out where no batch follows.
        settled: from which period on it is in every one of them, so that `exists` need not be asked.
        report_lag: reports that are ready are handed out before it, of batches up to so many periods before the one
            that it runs in; of any if it is -inf, and of none if it is None.
    """

    report_lag: float | None = -math.inf

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        action = instruction.action
        self.action, self.op, self.ahead, self._span = action, action.op, instruction.ahead, span
        self._name = action.op.value  # an enum takes longer to format than a string
        unit, m = action.unit, span.schedule.microbatches
        self._whole, self._m = unit.kind is Kind.BATCH, m
        self._first, self._stride = unit.first, 1 if self._whole else m
        self._offset = unit.first if self._whole else unit.first // m
        self._since, self._every = since(unit, m), unit.every
        self.settled = self._since if self._every == 1 else math.inf

    def exists(self, t: int) -> bool:
        """Return whether the period (or epilogue) of batch t has this instruction; what lies before a span has not."""
        if t < self._since:
            return False
        return self._every == 1 or not (self._first + t + 1) % self._every

    def run(self, t: int) -> Iterator[Wait] | None:
        """Run it in the period (or epilogue) of batch t; an iterator of waits where it has to wait first."""
        raise NotImplementedError


class BoundAction(Bound):
    """An action of a stage: it is played in the schedule's books, run, recorded and accounted for."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        action = self.action
        self.stage = span.stages[action.stage]
        runtime = self.stage.runtime
        self._runtime, self._recorder = runtime, span.recorder
        self._versions = () if action.reads is None else action.reads.versions
        self._derive = None if action.reads is None else action.reads.derive
        self._evaluates = action.unit.kind is Kind.EVAL
        plain = self._whole or (action.unit.count == 1 and not action.unit.slice and not self._evaluates)
        self._named = ActionName(self.stage.name, self._name, None if plain else action.unit)
        self._is_pass, self._bears = self.op in _PASSES, self.op in (Op.STEP, Op.VALIDATE, Op.AVERAGE)
        self._optimizers = self._bears or self.op in SWAPS  # whose bytes change
        weights = runtime.weights
        self._store = weights.store if isinstance(weights, TrainedWeights) and self.stage.trained else None
        self._copies = bool(self.stage.spec.copy_uses)
        self._place = action.stage.index, action.stage.direction
        piece = action.unit.slice[0] if action.unit.slice else 0
        self._keys = [(k, piece) for k in action.unit.microbatches]

    # --- numbers ----------------------------------------------------------------------------------------------------

    def turn(self, t: int) -> Turn:
        """Its numbers in the period (or epilogue) of batch t."""
        span, version = self._span, -1
        if self._versions:
            version = self._versions[0] + t
            version = span.start + (version if version > span.older else span.older)
        return Turn(t, self._first + t * self._stride, span.start + t + self._offset, version, self._named)

    def versions(self, turn: Turn) -> tuple[int, ...]:
        """All versions that it reads, counted from the start of training."""
        return tuple(self._span.start + max(v + turn.t, self._span.older) for v in self._versions)

    def copy(self, turn: Turn) -> Copy | None:
        """The derived weight copy that it reads or creates."""
        return None if self._derive is None else Copy(self._derive.label, self._derive.first + turn.t * self._m)

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, t: int) -> Iterator[Wait] | None:
        """Run it at once: it needs nothing of others."""
        self.act(self.turn(t))
        return None

    def work(self, turn: Turn) -> float | None:
        """Do it; may return a later start of the work than the call, for the trace."""
        raise NotImplementedError

    def note(self, turn: Turn, error: Exception) -> None:
        """Tell an error which action has raised it."""
        error.add_note(f"raised by {turn.label} of {self._runtime.module.where}, {self._described(turn)}")

    def _described(self, turn: Turn) -> str:
        """An action with the numbers of the training, such as: the forward of microbatch 1 of batch 4."""
        return f"{_NAMES.get(self.op, f'the {self._name}')} of {self._object(turn)}"

    def _object(self, turn: Turn) -> str:
        """What an action is about, such as: microbatch 1 of batch 4."""
        batch = f"batch {turn.batch}"
        if self._evaluates:
            batch = f"batch {turn.batch - self._span.start} of an evaluation"
        return batch if self._whole else f"microbatch {turn.first % self._m} of {batch}"

    def act(self, turn: Turn) -> None:
        """Run it in the books and in fact, and take account of what it changed."""
        stage, recorder, store = self.stage, self._recorder, self._store
        start = recorder.begin()
        recorder.doing = turn
        try:
            effect = stage.books.apply(self.action, turn.t, turn.first)
            start = self.work(turn) or start
        except Exception as error:
            self.note(turn, error)
            raise
        if store is not None:
            if self._bears or len(store.versions) != len(effect.versions):
                self._runtime.retain([v + self._span.start + turn.t for v in effect.versions])
            if self._copies:
                k = turn.t * self._m
                store.derived.retain([copy._replace(first=copy.first + k) for copy in effect.copies])
        if self._span.capture.holds:
            self._span.capture.record()
        if self._is_pass:
            stage.memory.after_pass()
        else:
            stage.memory.after_action(optimizers=self._optimizers)
        batch = -1 if self._evaluates else turn.batch  # evaluation is no batch of the training
        version = batch + 1 if self._bears else turn.version
        first, index, direction = -1 if self._whole else turn.first, *self._place
        recorder.add_work(start, recorder.now(), self._name, turn, index, direction, batch, version, first)
