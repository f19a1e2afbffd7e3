"""A span that is compiled once, for any number of costs: numbers only, no timeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.idle_time import TimeSplit
from penstock.schedule.array_schedules.array_lowering import ArrayLowered
from penstock.schedule.array_schedules.array_play import ArrayPlay, whole_span
from penstock.schedule.array_schedules.array_span import ArraySpan
from penstock.schedule.compiled.collective_events import NotCompiledError, StuckError
from penstock.schedule.compiled.evaluate import EventTimes, RankEnds, SpanTimes, Times, evaluate, lane_latencies
from penstock.schedule.compiled.event_graph_builder import graph_of
from penstock.schedule.compiled.graph import EventGraph
from penstock.schedule.compiled.instruction_arrays import CodedSchedule, coded
from penstock.schedule.lowering.send_window_search import SpanEnds
from penstock.schedule.machine.instructions import Lowered
from penstock.simulate.array_time_split import split_array_time
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
        NotCompiledError: the object machine has to play it; it does, and says why where ranks wait for ever. Where the
            schedule is arrays, that is found out when times are asked for.
    """

    def __init__(self, lowered: Lowered | CodedSchedule, batches: int = 1, transfers: bool = False) -> None:
        self._transfers, self._batches = transfers, batches
        self._lowered = lowered if isinstance(lowered, ArrayLowered) and not transfers else None
        self._lanes = lowered.lanes
        self._spans: dict[bool, ArraySpan] = {}
        self._last: tuple[tuple[Costs, ...], ArrayPlay] | None = None
        if self._lowered is None:
            self._graph: EventGraph = graph_of(
                lowered if isinstance(lowered, CodedSchedule) else coded(lowered), batches, transfers=transfers
            )
            if self._graph.steps.stuck:
                raise StuckError
            self._classes = self._graph.classes
        else:
            self._classes = self._lowered.lowering.classes

    @property
    def events(self) -> int:
        """The number of events whose times are computed."""
        return len(self._graph.cls) if self._lowered is None else int(self._span(travels=False).starts[-1])

    def times(self, costs: Sequence[Costs]) -> SpanTimes:
        """Return the times of the span, a column for each of the costs; messages take their time in all or in none."""
        assert self._transfers or not any(each.transfer for each in costs)
        if self._lowered is not None:
            return self._played(costs).times()
        return evaluate(self._graph, *self._taken(costs), np.array([each.transfer for each in costs], dtype=np.float64))

    def ends(self, costs: Costs) -> SpanEnds:
        """Return when the last rank is done, and whether anything has waited for room or for a RECV."""
        found: RankEnds
        if self._lowered is not None:
            found = self._played([costs]).ends()
        else:
            found = EventTimes(self._graph, *self._taken([costs]), np.array([costs.transfer])).ends()
        return SpanEnds((float(found.clocks.max()),), bool(found.held_up[0]))

    def bubbles(self, costs: Sequence[Costs]) -> list[Bubble]:
        """Return makespan and idle times for each of the costs."""
        found, group = list[Bubble](), max(_EVENTS // self.events, 1)
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

    def not_gone(self, costs: Costs) -> dict[int, int]:
        """Return by rank how many more activations are on its device than if copies to the host took no time.

        Raises:
            NotCompiledError: the schedule is arrays, which copy nothing.
        """
        if self._lowered is not None:
            raise NotCompiledError("arrays copy nothing to the host")
        found = EventTimes(self._graph, *self._taken([costs]), np.array([costs.transfer])).not_gone()
        return {rank: int(more[0]) for rank, more in found.items()}

    def time_split(self, costs: Costs) -> TimeSplit:
        """Return where the time of all ranks goes.

        Raises:
            NotCompiledError: the schedule is not arrays, or its messages occupy their lanes.
        """
        if self._lowered is None:
            raise NotCompiledError("only spans of arrays are split")
        return split_array_time(self._played([costs]), self.bubbles([costs])[0])

    def _taken(self, costs: Sequence[Costs]) -> tuple[Times, Times]:
        """Return what actions and messages take, a column for each of the costs."""
        durations = [[each.duration(action) for each in costs] for action in self._classes.examples]
        latency = lane_latencies(self._lanes, [each.latency for each in costs])
        return np.array(durations, dtype=np.float64).reshape(-1, len(costs)), latency

    def _span(self, travels: bool) -> ArraySpan:
        assert self._lowered is not None
        if travels not in self._spans:
            self._spans[travels] = whole_span(self._lowered, self._batches, travels)
        return self._spans[travels]

    def _played(self, costs: Sequence[Costs]) -> ArrayPlay:
        """Play a span of arrays; the last play for one cost is kept, as both its ends and its times are asked for.

        Raises:
            NotCompiledError: some ranks wait for ever.
        """
        if self._last is not None and self._last[0] == tuple(costs):
            return self._last[1]
        play = ArrayPlay(self._span(any(each.longest_latency for each in costs)), *self._taken(costs))
        play.run()
        if play.stuck:
            raise StuckError
        self._last = (tuple(costs), play) if len(costs) == 1 else None
        return play
