"""Makes an order on a V shorter by moving passes into gaps: the last step of Qi et al., arXiv 2405.15362.

Where a rank waits for a pass, one that comes later on this rank may be run before it, if that takes no more memory than
there is, and makes the longest span of a rank shorter; then the makespan; then all passes together earlier. The paper
moves passes in units of slots, here they have their times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.schedule.orders.v_progress import F1, I0, I1, OPS, W1, WEIGHTS, VPass, sources_of
from penstock.schedule.orders.zb_progress import SearchTask

Programs = list[list[VPass]]


@dataclass(frozen=True)
class OrderOnV:
    """An order whose passes each begin as soon as they can.

    Attributes:
        programs: the passes of each rank.
        starts: when they begin.
        ends: when those that are no W end, by rank, kind and microbatch.
        cost: the longest span of a rank, from its first start to its last end; the makespan; the sum of all starts.
    """

    programs: Programs
    starts: list[list[float]]
    ends: list[tuple[list[float], ...]]
    cost: tuple[float, float, float]


def timed(task: SearchTask, programs: Programs) -> OrderOnV | None:
    """An order with its times; None if some rank would wait for ever."""
    ends: list[tuple[list[float], ...]] = [([], [], [], []) for _ in programs]
    starts: list[list[float]] = [[] for _ in programs]
    sources, free = sources_of(task, ends), [0.0] * task.ranks
    durations = [task.times[op] for op in OPS]
    moved = True
    while moved:
        moved = False
        for s, program in enumerate(programs):
            for kind, k in program[len(starts[s]) :]:
                begin, source = free[s], sources[s][kind] if kind < W1 else None
                if source is not None:
                    if k >= len(source[0]):
                        break
                    begin = max(begin, source[0][k] + source[1])
                free[s] = begin + durations[kind]
                starts[s].append(begin)
                if kind < W1:
                    ends[s][kind].append(free[s])
                moved = True
    if any(len(row) < len(program) for row, program in zip(starts, programs, strict=True)):
        return None
    span = max(end - row[0] for end, row in zip(free, starts, strict=True))
    return OrderOnV(programs, starts, ends, (span, max(free), sum(map(sum, starts))))


def fits(task: SearchTask, program: Sequence[VPass]) -> bool:
    """Whether a rank never holds more than its limit, and runs the passes of each microbatch one after the other."""
    held, done = 0, set()
    for kind, k in program:
        held += 100 if kind <= F1 else task.held - 100 if kind < W1 else -task.held
        before = kind - WEIGHTS if kind >= W1 else I0 - kind
        if held > task.limit or (kind >= I1 and (before, k) not in done):
            return False
        done.add((kind, k))
    return True


def reordered(task: SearchTask, order: OrderOnV, trials: int) -> tuple[OrderOnV, int]:
    """An order that no single move makes better, or what it has become after so many trials; and the trials left."""
    improved = True
    while improved:
        improved = False
        for s in range(task.ranks):
            place = 1
            while place < len(order.programs[s]):
                better = None
                for moved in _moves(task, order, s, place):
                    if not trials:
                        return order, 0
                    trials -= 1
                    found = timed(task, [*order.programs[:s], moved, *order.programs[s + 1 :]])
                    if found is not None and found.cost < order.cost:
                        better = found
                        break
                order, improved = (better, True) if better is not None else (order, improved)
                place += 1
    return order, trials


def _moves(task: SearchTask, order: OrderOnV, s: int, place: int) -> Iterator[list[VPass]]:
    """The programs of a rank with the next pass of each kind before the pass in a place that the rank waits for."""
    program, starts = order.programs[s], order.starts[s]
    if starts[place] <= starts[place - 1] + task.times[OPS[program[place - 1][0]]]:
        return
    seen = {program[place][0]}
    for later in range(place + 1, len(program)):
        if program[later][0] not in seen:
            seen.add(program[later][0])
            moved = [*program[:place], program[later], *program[place:later], *program[later + 1 :]]
            if fits(task, moved):
                yield moved
        if len(seen) == len(OPS):
            return
