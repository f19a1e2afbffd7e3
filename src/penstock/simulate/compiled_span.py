"""A span that is compiled once, for any number of costs: numbers only, no timeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.evaluate import EventTimes, SpanTimes, evaluate
from penstock.schedule.compiled.event_graph_builder import graph_of
from penstock.schedule.compiled.graph import EventGraph
from penstock.schedule.compiled.instruction_arrays import CodedSchedule, coded
from penstock.schedule.lowering.send_window_search import SpanEnds
from penstock.schedule.machine.instructions import Lowered
from penstock.simulate.costs import Costs
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

    def ends(self, costs: Costs) -> SpanEnds:
        """Return when the last rank is done, and whether anything has waited for room or for a RECV."""
        durations = np.array([[costs.duration(action)] for action in self._graph.classes.examples])
        hop = np.array([costs.latency]), np.array([costs.transfer])
        found = EventTimes(self._graph, durations, *hop).ends()
        return SpanEnds((float(found.clocks.max()),), bool(found.held_up[0]))

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
