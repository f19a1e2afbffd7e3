"""Insert PREDICTs: before each pass that reads a predicted copy, or once per batch for all of its passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Action, Copy, Op, Program, Stage, Unit, WeightRef

if TYPE_CHECKING:
    from penstock.schedule.ir.version_rules import VersionRule

FORWARD, BACKWARD = "f", "b"
"""Labels of the copies that forwards and backwards read."""


def with_predictions(program: Program, rule: VersionRule, microbatches: int) -> Program:
    """Add PREDICTs to a rank's program, and annotate the passes that read their copies.

    Args:
        program: a program with STEPs.
        rule: a rule under which some passes read copies.
        microbatches: m.
    """
    return _PredictPlacing(program, rule, microbatches).place()


class _PredictPlacing:
    def __init__(self, program: Program, rule: VersionRule, m: int) -> None:
        self.program, self.rule, self.m = program, rule, m
        self.borne = {a.stage: a.unit.first for a in program.period if a.op is Op.STEP}
        # For microbatch k of a batch: the version, relative to the batch, from which its copy is made.
        self.made: dict[tuple[Stage, str, int], int] = {}
        newest = dict(self.borne)
        for action in program.period:
            if action.op is Op.STEP:
                newest[action.stage] = action.unit.first + 1
            label = self._label(action)
            if label and (label == BACKWARD or action.op is Op.F):
                batch, k = divmod(action.unit.first, m)
                self.made[action.stage, label, k] = newest[action.stage] - batch

    def place(self) -> Program:
        """Return the program with its PREDICTs."""
        period, epilogue = (tuple(self._placed(actions)) for actions in self.program)
        return Program(period, epilogue)

    def _label(self, action: Action) -> str:
        """Return the label of the copy that an action reads, or "" if it reads none."""
        if any(p.stage in self.borne for p in action.parts):
            raise ScheduleError(f"{action}: fused passes cannot read predictions")
        if action.stage not in self.borne or action.op not in (Op.F, Op.B):
            return ""
        if action.op is Op.B and self.rule.copies_backward:
            return BACKWARD
        return FORWARD if self.rule.copies_forward and (action.op is Op.F or self.rule.keeps_copy) else ""

    def _placed(self, actions: tuple[Action, ...]) -> Iterator[Action]:
        for action in actions:
            label = self._label(action)
            if not label:
                yield action
                continue
            batch, k = divmod(action.unit.first, self.m)
            leader = 0 if self.rule.shares else k
            copy = Copy(label, batch * self.m + leader)
            reads = WeightRef((self.made[action.stage, label, leader] + batch,), copy)
            if leader == k and (label == BACKWARD or action.op is Op.F):
                yield Action(Op.PREDICT, action.stage, Unit(copy.first), reads)
            yield action._replace(reads=reads)
