"""How long a span takes for many costs at once: numbers only, no timeline.

The schedule is compiled once (`penstock.schedule.compiled`), and every number is that of the timeline that `play`
makes, to the last bit. What cannot be compiled is played.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.compiled.code import CodedSchedule, coded
from penstock.schedule.compiled.evaluate import SpanTimes, evaluate
from penstock.schedule.compiled.graph import EventGraph
from penstock.schedule.compiled.joint import NotCompiledError
from penstock.schedule.compiled.span import graph_of
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import play
from penstock.timeline import Bubble

_EVENTS = 1 << 23
"""Times that are held at once: costs are taken in groups, so that memory does not grow with their number."""


class CompiledSpan:
    """A span of a schedule, compiled for any number of costs.

    Args:
        lowered: the schedule with its messages; or what `coded` makes of it, for several spans.
        batches: length of the span.
        transfers: whether messages occupy their lane for some time.

    Raises:
        NotCompiledError: the object machine has to play it; it does, and says why where ranks wait for ever.
    """

    def __init__(self, lowered: Lowered | CodedSchedule, batches: int = 1, transfers: bool = False) -> None:
        self._transfers = transfers
        code = lowered if isinstance(lowered, CodedSchedule) else coded(lowered)
        self._graph: EventGraph = graph_of(code, batches, transfers=transfers)
        if self._graph.steps.stuck:
            raise NotCompiledError("some ranks wait for ever")

    @property
    def events(self) -> int:
        """The number of events of the graph."""
        return len(self._graph.cls)

    @property
    def steps(self) -> int:
        """The number of steps in which they are computed."""
        return len(self._graph.steps.ends)

    def times(self, costs: Sequence[Costs]) -> SpanTimes:
        """Return the times of the span, a column for each of the costs; messages take their time in all or in none."""
        assert self._transfers or not any(each.transfer for each in costs)
        durations = [[each.duration(action) for each in costs] for action in self._graph.classes.examples]
        return evaluate(
            self._graph,
            np.array(durations, dtype=np.float64).reshape(-1, len(costs)),
            np.array([each.latency for each in costs], dtype=np.float64),
            np.array([each.transfer for each in costs], dtype=np.float64),
        )

    def bubbles(self, costs: Sequence[Costs]) -> list[Bubble]:
        """Return makespan and idle times for each of the costs."""
        found, group = list[Bubble](), max(_EVENTS // len(self._graph.cls), 1)
        for start in range(0, len(costs), group):
            times = self.times(costs[start : start + group])
            first = times.first.min(axis=0)
            makespans = times.last.max(axis=0) - np.where(np.isinf(first), 0.0, first)
            spans = (times.last - np.where(np.isinf(times.first), 0.0, times.first)).max(axis=0)
            found += [
                Bubble(float(makespan), float(span), tuple(busy))
                for makespan, span, busy in zip(makespans, spans, times.busy.T.tolist(), strict=True)
            ]
        return found


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
