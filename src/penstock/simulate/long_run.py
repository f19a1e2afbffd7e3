"""The bubble of a long run: what one more batch adds to a span that is long already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.gc_pause import no_collection
from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.op_table import OPS, Lane
from penstock.schedule.ir.schedule import Action, passes
from penstock.schedule.machine.instructions import Lowered
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs

_MORE = 8  # batches whose mean counts where they do not all take the same time


class SteadyBatch(NamedTuple):
    """One more batch in a long span.

    Attributes:
        time: by which it lengthens the span.
        bubble: idle / total of what it adds.
    """

    time: float
    bubble: float


def steady_bubble(lowered: Lowered, costs: Costs, batches: int) -> float:
    """The bubble of one more batch in a long span; arguments as of `steady_batch`."""
    return steady_batch(lowered, costs, batches).bubble


@no_collection
def steady_batch(lowered: Lowered, costs: Costs, batches: int) -> SteadyBatch:
    """One more batch in a long span: what it adds to a span of `batches` batches.

    Schedules that are arrays are compiled, as spans of `batches` batches and of one more. Others are played: one
    span is played batch by batch. As soon as a batch leaves the same things under way as the batch before, all of
    them later by one and the same time, every batch from there on adds that time, and nothing more has to be
    played: schedules that flush take two batches, or a few more where links differ. Where that has not happened,
    the span is ended both after `batches` batches and after one more. Where ranks slow each other down, batches may
    take different times for ever: there the mean of several more counts.

    Args:
        lowered: the schedule with its messages.
        costs: times of every stage.
        batches: length of the span to which a batch is added; at least 1.
    """
    if costs.slow_down(lowered.schedule.ranks):
        return _played(lowered, costs, batches)
    if isinstance(lowered, ArrayLowered):
        return _compiled(lowered, costs, batches)
    work, ranks = _Work(), len(lowered.programs)
    machine = costs.machine(lowered, work.observe)
    machine.play_period(-1, more=True)
    repeats_from = _repeats_from(lowered)
    shorter, border = machine, (machine.state(0), machine.times())
    for t in range(batches):
        done, began, before = replace(work), max(machine.clock), border
        if t == batches - 1:
            shorter = machine.copy()
        machine.play_period(t, more=True)
        border, later = (machine.state(t + 1), machine.times()), max(machine.clock) - began
        if t >= repeats_from and border[0] == before[0] and _is_shifted(before[1], border[1], later):
            return SteadyBatch(later, _idle_share(work.busy - done.busy, ranks * later))
    shorter.observer = done.observe
    shorter.play_period(batches - 1, more=False)
    shorter.play_epilogue(batches)
    machine.play_period(batches, more=False)
    machine.play_epilogue(batches + 1)
    later = work.makespan - done.makespan
    return SteadyBatch(later, _idle_share(work.busy - done.busy, ranks * later))


def _compiled(lowered: ArrayLowered, costs: Costs, batches: int) -> SteadyBatch:
    """Return the same from the ends of two spans."""
    spans = (CompiledSpan(lowered, n, transfers=costs.transfer > 0) for n in (batches, batches + 1))
    shorter, longer = (span.bubbles([costs])[0] for span in spans)
    later = longer.makespan - shorter.makespan
    return SteadyBatch(later, _idle_share(sum(longer.busy) - sum(shorter.busy), lowered.schedule.ranks * later))


def _played(lowered: Lowered, costs: Costs, batches: int) -> SteadyBatch:
    """Return the mean of what some more batches add, from two spans that are played."""
    shorter, longer = _Work(), _Work()
    for work, count in (shorter, batches), (longer, batches + _MORE):
        costs.machine(lowered, work.observe).play(count)
    later = (longer.makespan - shorter.makespan) / _MORE
    return SteadyBatch(later, _idle_share((longer.busy - shorter.busy) / _MORE, lowered.schedule.ranks * later))


@dataclass
class _Work:
    """What the compute lanes of all ranks have done: their working time, the first start, the last end."""

    busy: float = 0.0
    start: float = math.inf
    end: float = 0.0

    def observe(self, _rank: int, action: Action, _t: int, start: float, end: float) -> None:
        if action.parts or OPS[action.op].lane is Lane.COMPUTE:
            self.busy += end - start
            self.start, self.end = min(self.start, start), max(self.end, end)

    @property
    def makespan(self) -> float:
        return max(self.end - self.start, 0.0)


def _repeats_from(lowered: Lowered) -> float:
    """The first batch in whose period every action exists; infinite if there are some that not every batch has."""
    actions = [p for program in lowered.programs for i in program.period for p in passes(i.action)]
    if any(action.unit.every > 1 for action in actions):
        return math.inf
    return max((since(action.unit, lowered.schedule.microbatches) for action in actions), default=0)


def _is_shifted(before: Sequence[float], after: Sequence[float], later: float) -> bool:
    """Whether all times have moved by the same amount, but for rounding."""
    rounding = 1e-9 * max(after, default=0.0)
    return len(before) == len(after) and all(abs(b - a - later) <= rounding for a, b in zip(before, after, strict=True))


def _idle_share(busy: float, total: float) -> float:
    return 1 - busy / total if total else 0.0
