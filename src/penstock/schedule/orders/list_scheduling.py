"""Orders that nobody has written down as a table: each rank takes the most urgent pass that is ready, step by step.

A list scheduler in whole units of time, without communication. Urgent is: a backward before a forward, then the oldest
microbatch, then the deepest stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from penstock.schedule.ir.order import pass_of
from penstock.schedule.ir.schedule import Action, Op, Stage


def greedy(
    ways: Mapping[int, Sequence[Stage]], microbatches: Mapping[int, int], *, backward: int, in_flight: int
) -> list[list[Action]]:
    """The passes of each rank.

    Args:
        ways: microbatch -> its stages, from the first stage to the last.
        microbatches: microbatch -> how urgent it is; the oldest has the lowest number.
        backward: how long a backward of a stage takes; a forward takes 1.
        in_flight: microbatches that may be under way at once, of those that enter at the same stage.
    """
    ranks = 1 + max(stage.rank for way in ways.values() for stage in way)
    ready: list[list[tuple[tuple[int, int, int], Action, int]]] = [[] for _ in range(ranks)]
    found: list[list[Action]] = [[] for _ in range(ranks)]
    waiting: dict[Stage, list[int]] = {}
    for k in sorted(ways, key=microbatches.__getitem__):
        waiting.setdefault(ways[k][0], []).append(k)
    time, free = 0, [0] * ranks
    events: list[tuple[int, int, Action, int]] = []

    def offer(op: Op, k: int, place: int) -> None:
        stage = ways[k][place]
        heapq.heappush(ready[stage.rank], ((op is Op.F, microbatches[k], -place), pass_of(op, k, stage), place))

    def finish(action: Action, place: int) -> None:
        k, way = action.unit.first, ways[action.unit.first]
        if action.op is Op.F and place + 1 < len(way):
            offer(Op.F, k, place + 1)
        elif action.op is Op.F:
            offer(Op.B, k, place)
        elif place:
            offer(Op.B, k, place - 1)
        elif waiting[way[0]]:
            offer(Op.F, waiting[way[0]].pop(0), 0)

    for queue in waiting.values():
        for k in queue[:in_flight]:
            offer(Op.F, k, 0)
        del queue[:in_flight]
    number = 0
    while any(ready) or events:
        for rank in range(ranks):
            if ready[rank] and free[rank] <= time:
                _, action, place = heapq.heappop(ready[rank])
                found[rank].append(action)
                free[rank] = time + (1 if action.op is Op.F else backward)
                heapq.heappush(events, (free[rank], number, action, place))
                number += 1
        time = events[0][0]
        while events and events[0][0] == time:
            _, _, action, place = heapq.heappop(events)
            finish(action, place)
    return found
