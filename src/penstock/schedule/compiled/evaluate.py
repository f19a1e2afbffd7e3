"""The times of a graph for many costs at once: the longest path to every event.

Sums and maxima are those of the object machine (`penstock.schedule.machine.play`), in the same order, so results are
equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.compiled.graph import OWN, ROOM, TRANSFER, EventGraph
from penstock.schedule.machine.instructions import LaneKey
from penstock.schedule.machine.message_lanes import Latency, latency_between

Times = NDArray[np.float64]
Places = NDArray[np.int64] | NDArray[np.int32]


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


@dataclass(frozen=True, eq=False)
class RankEnds:
    """The end of a span alone, for k costs; attributes as of `SpanTimes`."""

    clocks: Times
    held_up: NDArray[np.bool_]


def lane_latencies(lanes: Sequence[LaneKey], latencies: Sequence[Latency]) -> Times:
    """Return the latency of the messages on every lane (rows) for every cost (columns)."""
    found = [[latency_between(each, lane.source, lane.target) for each in latencies] for lane in lanes]
    return np.array(found, dtype=np.float64).reshape(len(lanes), len(latencies))


def evaluate(graph: EventGraph, durations: Times, latency: Times, transfer: Times) -> SpanTimes:
    """Return the times of a span.

    Args:
        graph: a graph that is not stuck.
        durations: of the classes of actions (rows) for every cost (columns).
        latency: of messages on every lane (rows) for every cost; or one row for all lanes.
        transfer: of messages, for every cost. Only a graph with transfers takes it into account.
    """
    found = EventTimes(graph, durations, latency, transfer)
    works = np.concatenate([np.zeros(OWN, dtype=bool), graph.classes.works()])
    first, last, busy = (np.zeros((graph.ranks, durations.shape[1])) for _ in range(3))
    for rank in range(graph.ranks):
        events = np.arange(graph.chains[rank], graph.chains[rank + 1])
        work = events[works[graph.cls[events]]]
        begin, end = found.begins(work), found.of(work)
        first[rank] = begin.min(axis=0, initial=np.inf)
        last[rank] = end.max(axis=0, initial=0.0)
        if len(work):
            busy[rank] = np.cumsum(end - begin, axis=0)[-1]
    ends = found.ends()
    return SpanTimes(ends.clocks, first, last, busy, ends.held_up)


class EventTimes:
    """When every event of a graph ends, for k costs; arguments as of `evaluate`."""

    def __init__(self, graph: EventGraph, durations: Times, latency: Times, transfer: Times) -> None:
        self.graph, self._transfer = graph, transfer
        self._latency = np.zeros((1 + int(graph.lane.max(initial=0)), durations.shape[1]))
        self._latency[1:] = latency if latency.ndim == 1 else latency[: len(self._latency) - 1]
        table = np.zeros((OWN + len(durations), durations.shape[1]))
        table[TRANSFER], table[OWN:] = transfer, durations
        self._place = _places(graph)
        self._times = _times(graph, self._place, table, self._latency)

    def of(self, events: Places) -> Times:
        """Return when events end."""
        return self._times[self._place[events]]

    def arrivals(self, messages: Places) -> Times:
        """Return when messages arrive."""
        graph = self.graph
        both = np.maximum(self.of(graph.posted[messages]), self.of(graph.ready[messages]))
        both += self._latency[graph.lane[messages]]
        return both

    def begins(self, events: Places) -> Times:
        """Return when events begin."""
        return np.maximum(self.of(events - 1), self.arrivals(self.graph.message[events]))

    def not_gone(self) -> dict[int, NDArray[np.int64]]:
        """Return, by rank and cost, how many more activations are on its device than if copies took no time.

        What is moved to the host is there until its copy ends. The most are compared, so that nothing counts which is
        late while there is room.
        """
        found = {}
        for rank, first, away, graphs in self.graph.copies:
            events, sent = first + np.arange(len(away)), np.concatenate([[0], np.cumsum(away)])
            ends, issued = self.of(events), self.of(self.graph.posted[self.graph.message[events]])
            more = []
            for end, when in zip(ends.T, issued.T, strict=True):
                made = np.minimum(np.searchsorted(end, when, side="right"), np.arange(len(away)))
                more.append(int((graphs + sent[:-1] - sent[made]).max() - graphs.max()))
            found[rank] = np.array(more)
        return found

    def ends(self) -> RankEnds:
        """Return when the ranks are done, and whether anything has waited for room, or for a RECV."""
        graph = self.graph
        rooms = np.flatnonzero(graph.cls == ROOM)
        held_up = (self.arrivals(graph.message[rooms]) > self.of(rooms - 1)).any(axis=0)
        hops = (self._latency != 0) | (self._transfer != 0)
        late = np.flatnonzero(graph.met) if hops.any() else np.empty(0, dtype=np.int64)
        waited = ((self.of(graph.ready[late]) > self.of(graph.posted[late])) & hops[graph.met[late]]).any(axis=0)
        return RankEnds(self.of(graph.chains[1 : graph.ranks + 1] - 1), held_up | waited)


def _places(graph: EventGraph) -> NDArray[np.int32]:
    """Return the place of every event in the order of steps, behind START, NEVER and the starts of chains."""
    firsts, events = graph.chains[:-1], graph.steps.events
    place = np.zeros(len(graph.message), dtype=np.int32)
    place[1] = 1
    place[firsts] = np.arange(2, 2 + len(firsts))
    place[events] = np.arange(2 + len(firsts), 2 + len(firsts) + len(events))
    return place


def _times(graph: EventGraph, place: NDArray[np.int32], table: Times, latency: Times) -> Times:
    """Return when events end, in the order of steps.

    What the events of a step wait for stands together, three rows for each step (one end of their messages, the other
    end, the event before), so that a step takes few operations on arrays.
    """
    events, fixed = graph.steps.events, len(graph.chains) + 1
    sizes = np.diff(graph.steps.ends, prepend=0)
    starts, size = np.repeat(np.cumsum(sizes) - sizes, sizes), np.repeat(sizes, sizes)
    rows = 2 * starts + np.arange(len(events))
    wanted = graph.message[events]
    sources = np.empty(3 * len(events), dtype=np.int32)
    sources[rows], sources[rows + size] = place[graph.posted[wanted]], place[graph.ready[wanted]]
    sources[rows + 2 * size] = place[events - 1]
    lane, hops = np.zeros(3 * len(events), dtype=np.int32), bool(latency.any())
    if hops:
        lane[rows] = lane[rows + size] = graph.lane[wanted]
    one = table.shape[1] == 1  # vectors are faster than matrices of one column
    times = np.full((fixed + len(events), *(() if one else table.shape[1:])), -np.inf)
    times[2:fixed] = 0.0
    cls, costs = graph.cls[events], table[:, 0] if one else table
    shape, span = (3, -1) if one else (3, -1, table.shape[1]), costs.take(cls, axis=0) if one else None
    hop = latency[:, 0].take(lane) if one and hops else None
    start = 0
    for end in graph.steps.ends:
        here = slice(3 * start, 3 * end)
        found = times.take(sources[here], axis=0)
        if hops:
            found += latency.take(lane[here], axis=0) if hop is None else hop[here]
        taken = costs.take(cls[start:end], axis=0) if span is None else span[start:end]
        begin = np.maximum.reduce(found.reshape(shape), axis=0)
        np.add(begin, taken, out=times[fixed + start : fixed + end])
        start = end
    return times.reshape(len(times), -1)
