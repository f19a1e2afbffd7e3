"""The times of a graph for many costs at once: the longest path to every event.

Sums and maxima are those of the object machine (`penstock.schedule.machine.play`), in the same order, so results are
equal to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.compiled.code import Numbers
from penstock.schedule.compiled.graph import OWN, ROOM, TRANSFER, EventGraph

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SpanTimes:
    """When a span ends, for k costs.

    Attributes:
        clocks: per rank and cost, when the rank is done.
        first, last: per rank and cost, the start of its first work and the end of its last; infinite and 0 where it has
            none.
        busy: per rank and cost, working time.
        held_up: per cost, whether a SEND or RECV has waited for room, or a message on its way for its RECV.
    """

    clocks: Times
    first: Times
    last: Times
    busy: Times
    held_up: NDArray[np.bool_]


def evaluate(graph: EventGraph, durations: Times, latency: Times, transfer: Times) -> SpanTimes:
    """Return the times of a span.

    Args:
        graph: a graph that is not stuck.
        durations: of the classes of actions (rows) for every cost (columns).
        latency, transfer: of messages, for every cost. Only a graph with transfers takes the second into account.
    """
    count = durations.shape[1]
    table = np.zeros((OWN + len(durations), count))
    table[TRANSFER], table[OWN:] = transfer, durations
    place, times = _times(graph, table, latency)
    works = np.concatenate([np.zeros(OWN, dtype=bool), graph.classes.works()])
    clocks, first, last, busy = (np.zeros((graph.ranks, count)) for _ in range(4))
    held_up = np.zeros(count, dtype=bool)

    def arrivals(messages: Numbers) -> Times:
        both = np.maximum(times[place[graph.posted[messages]]], times[place[graph.ready[messages]]])
        return both + np.where(graph.travels[messages][:, None], latency, 0.0)

    for rank in range(graph.ranks):
        events = np.arange(graph.chains[rank], graph.chains[rank + 1])
        clocks[rank] = times[place[events[-1]]]
        work = events[works[graph.cls[events]]]
        begin = np.maximum(times[place[work - 1]], arrivals(graph.message[work]))
        end = times[place[work]]
        first[rank] = begin.min(axis=0, initial=np.inf)
        last[rank] = end.max(axis=0, initial=0.0)
        if len(work):
            busy[rank] = np.cumsum(end - begin, axis=0)[-1]
        rooms = events[graph.cls[events] == ROOM]
        held_up |= (arrivals(graph.message[rooms]) > times[place[rooms - 1]]).any(axis=0)
    late = np.flatnonzero(graph.met)
    waited = (times[place[graph.ready[late]]] > times[place[graph.posted[late]]]).any(axis=0)
    return SpanTimes(clocks, first, last, busy, held_up | (waited & ((latency != 0) | (transfer != 0))))


def _times(graph: EventGraph, table: Times, latency: Times) -> tuple[NDArray[np.int32], Times]:
    """Return the place of every event in the order of steps, and the times at which events end, in that order."""
    steps, firsts = graph.steps, graph.chains[:-1]
    fixed = 2 + len(firsts)
    place = np.zeros(len(graph.message), dtype=np.int32)
    place[1] = 1
    place[firsts] = np.arange(2, fixed)
    place[steps.events] = np.arange(fixed, fixed + len(steps.events))
    times = np.full((fixed + len(steps.events), table.shape[1]), -np.inf)
    times[2:fixed] = 0.0
    wanted = graph.message[steps.events]
    before, posted, ready = place[steps.events - 1], place[graph.posted[wanted]], place[graph.ready[wanted]]
    cls, travels, hops = graph.cls[steps.events], graph.travels[wanted][:, None], bool(latency.any())
    start = 0
    for end in steps.ends:
        here = slice(start, end)
        found = times.take(posted[here], axis=0)
        np.maximum(found, times.take(ready[here], axis=0), out=found)
        if hops:
            found += np.where(travels[here], latency, 0.0)
        np.maximum(found, times.take(before[here], axis=0), out=found)
        found += table.take(cls[here], axis=0)
        times[fixed + start : fixed + end] = found
        start = end
    return place, times
