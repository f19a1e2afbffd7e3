"""How long a span takes for many costs at once: numbers only, no timeline.

The schedule is compiled once (`penstock.schedule.compiled`), and every number is that of the timeline that `play`
makes, to the last bit. What cannot be compiled is played.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.compiled.joint import NotCompiledError
from penstock.schedule.machine.instructions import Lowered
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import play
from penstock.timeline import Bubble


def predict(lowered: Lowered, costs: Sequence[Costs], batches: int = 1) -> list[Bubble]:
    """Return makespan and idle times of a span for each of several costs.

    Args:
        lowered: the schedule with its messages.
        costs: times of every stage, several times.
        batches: length of the span; the pipeline starts empty and is drained.

    Raises:
        ScheduleError: some ranks would wait for ever.
    """
    try:
        return CompiledSpan(lowered, batches, any(each.transfer for each in costs)).bubbles(costs)
    except NotCompiledError:
        return [play(lowered, each, batches)[0].bubble() for each in costs]
