"""The events of a span and what each of them waits for: a graph of which no cost is a part.

A *chain* holds events that follow one another: those of a rank, those of a lane that messages occupy for some time, or
those of a lane of collectives. An event begins when the one before it in its chain has ended and its one *message* has
come, and ends a duration later:

    begin = max(end of the event before, max(end of a, end of b) + latency of the message),   end = begin + duration

where a and b are the two events of the message: its SEND has been posted, its RECV has been posted. An event that waits
for several messages stands behind others that take no time and wait for one each; the maximum is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.compiled.instruction_arrays import CostClasses, Flags, Numbers

START, NEVER = 0, 1
"""Events that precede all others and that do not happen. The message of the same number joins them to themselves."""
WAIT, ROOM, TRANSFER, OWN = range(4)
"""Classes of events that take no time, those that wait for room on a lane, those that occupy a lane; actions follow."""


class CopyLane(NamedTuple):
    """The copies of one rank, in their order.

    Attributes:
        rank: whose.
        first: the event of the first one; the others follow.
        away: which move activations to the host.
        graphs: of the rank on its device directly before these, and directly behind others, if copies took no time.
    """

    rank: int
    first: int
    away: Flags
    graphs: Numbers


@dataclass(frozen=True, eq=False)
class EventGraph:
    """Events and messages of a span.

    Attributes:
        classes: of actions; class i of them is class `OWN` + i of events.
        cls: the class of every event.
        message: the message that every event waits for; 0 for none.
        posted, ready: per message, the events a and b.
        lane: per message, 1 + the index of the lane whose latency it takes; 0 for what takes none.
        chains: the first event of every chain, which is not one of the machine but its start at time 0, and one past
            the last; ranks come first.
        ranks: how many of the chains are ranks.
        met: per message whose SEND and RECV meet on a lane, 1 + its index; 0 for others.
        copies: the lanes of copies to the host's memory and back.
    """

    classes: CostClasses
    cls: NDArray[np.int32]
    message: NDArray[np.int32]
    posted: NDArray[np.int32]
    ready: NDArray[np.int32]
    lane: NDArray[np.int32]
    chains: Numbers
    ranks: int
    met: NDArray[np.int32]
    copies: Sequence[CopyLane] = ()

    @cached_property
    def steps(self) -> Steps:
        """An order in which events may be computed."""
        return _steps(self)


@dataclass(frozen=True, eq=False)
class Steps:
    """Events in an order in which each comes after those that it depends on.

    Attributes:
        events: their numbers.
        ends: of each step, one past the last place; the events of a step do not depend on one another.
        heads: of each chain, the first event that does not happen; one past its last if all do.
        stuck: whether some rank waits for ever.
    """

    events: NDArray[np.int32]
    ends: list[int]
    heads: Numbers
    stuck: bool


def _steps(graph: EventGraph) -> Steps:
    """Let every chain advance by one event in a step, if what it waits for has been."""
    firsts, stops, count = graph.chains[:-1], graph.chains[1:], len(graph.message)
    # The start of a chain is never reached from the one before, so a chain that has ended stays where it is.
    posted, ready = (np.append(ends[graph.message], NEVER) for ends in (graph.posted, graph.ready))
    posted[firsts] = NEVER
    been = np.zeros(count, dtype=bool)
    been[START] = True
    been[firsts] = True
    found = np.empty(count, dtype=np.int32)
    heads, place, ends = firsts + 1, 0, list[int]()
    while True:
        free = been.take(posted.take(heads))
        free &= been.take(ready.take(heads))
        here = heads[free]
        if not len(here):
            break
        been[here] = True
        found[place : place + len(here)] = here
        place += len(here)
        ends.append(place)
        heads = heads + free
    return Steps(found[:place], ends, heads, bool((heads < stops)[: graph.ranks].any()))
