"""A greedy list scheduler, for orders whose papers give no table: each rank runs the most urgent pass that is ready.

It works in whole units of time, without communication. Backwards are more urgent than forwards, then older microbatches
than younger ones, then later stages than earlier ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from penstock.schedule.ir.order import pass_of
from penstock.schedule.ir.schedule import Action, Op, Stage


def greedy(
    ways: Mapping[int, Sequence[Stage]], microbatches: Mapping[int, int], *, backward: int, in_flight: int
) -> list[list[Action]]:
    """Schedule all passes greedily and return those of each rank in order.

    Args:
        ways: microbatch -> its stages, from the first stage to the last.
        microbatches: microbatch -> its age rank; the oldest has the lowest number and is the most urgent.
        backward: time of a backward of a stage; a forward takes 1.
        in_flight: limit of microbatches in flight at once among those that enter at the same stage.
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
