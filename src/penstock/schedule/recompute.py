"""Schedules that run forwards again: an R directly before each backward, not a graph kept since the forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.ir import Action, Op, Program, Schedule, passes
from penstock.schedule.versions import RULES, Source

_BACKWARDS = (Op.B, Op.I)
"""The first backward of a unit."""


def with_recompute(schedule: Schedule) -> Schedule:
    """The schedule with a recompute before each backward, on the weights that the version rule names.

    A cut whose backwards directly follow their forwards keeps nothing for long, and is left as it is.

    Raises:
        ScheduleError: backwards read derived copies, so that it takes more to say what a recompute reads.
    """
    rule = RULES[schedule.rule]
    if Source.COPY in (rule.backward, rule.recompute):
        raise ScheduleError(
            f"{schedule.name}: rule {rule.name!r} needs an order that places its own recomputes; do without recompute"
        )
    cuts = {action.node.cut for program in schedule.programs for action in _delayed(program)}

    def insert(actions: tuple[Action, ...]) -> Iterator[Action]:
        for action in actions:
            for p in passes(action):
                if p.op in _BACKWARDS and p.node.cut in cuts:
                    yield Action(Op.R, p.node, p.unit, p.reads)
            yield action

    programs = tuple(Program(tuple(insert(p.period)), tuple(insert(p.epilogue))) for p in schedule.programs)
    return replace(schedule, programs=programs)


def _delayed(program: Program) -> Iterator[Action]:
    """The backwards that do not directly follow their forward."""
    before = None
    for action in (*program.period, *program.epilogue):
        for p in passes(action):
            if p.op in _BACKWARDS and (before is None or before._replace(op=p.op) != p):
                yield p
        before = action
