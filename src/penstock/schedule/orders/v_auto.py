"""Orders on a V searched for given times and memory, after the framework of Qi et al. (arXiv 2405.15362).

Two chunks per rank, as of ZB-V, V-Half and V-Min, which are made for F = I = W. The paper's steps, with times
in place of slots:

    repeat      every building block there is (`v_blocks`), one for each microbatch;
    squeeze     each rank runs its passes in the order of the blocks as soon as they are ready and memory allows, those
                of about one block before their turn if the next one waits; a W where it fits into the wait;
    reorder     passes move into the gaps that are left, where that makes the order shorter (`v_reorder`).

Blocks are first tried on few microbatches, the best of them with other ways to squeeze as well, and the best orders are
reordered. ZB-V, V-Half and V-Min are among these where memory allows them, so the longest span of a rank is never
longer than theirs. How blocks are squeezed and what is tried is our own heuristic.

p=2, m=3, F = 2, I = 3, W = 1, at most 1 microbatch on a rank, and at most 2 (lower case is chunk 1):
    r0: F0 f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 I2 W2
    r1: F0 f0 i0 I0 w0 W0 F1 f1 i1 I1 w1 W1 F2 f2 i2 I2 w2 W2

    r0: F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2
    r1: F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, zigzag
from penstock.schedule.ir.schedule import WINDOW, Op
from penstock.schedule.orders.controllable_memory import v_half, v_min
from penstock.schedule.orders.v_blocks import PERIOD, Block, building_blocks
from penstock.schedule.orders.v_progress import (
    CHUNKS,
    F0,
    F1,
    I0,
    I1,
    OPS,
    W1,
    WEIGHTS,
    VPass,
    push_together,
    sources_of,
)
from penstock.schedule.orders.zb_progress import SearchTask
from penstock.schedule.orders.zb_v import zb_v
from penstock.schedule.orders.zero_bubble import check_percentage

_SQUEEZES = ((6, 1.0), (1, 1.0), (math.inf, 1.0), (6, 0.5), (math.inf, 0.01))
"""Slots by which a pass may run before its turn, and the part of a W that must fit into a wait."""
_BLOCKS, _FURTHER, _REORDERED = 64, 12, 24
"""Blocks that are tried on all microbatches; of them, with all squeezes; orders that are reordered."""
_MOVED = 400_000
"""Passes that are placed anew while orders are reordered, at most: what bounds the time that it takes."""
Programs = list[list[VPass]]


def v_auto(
    stages: int,
    microbatches: int,
    *,
    limit: int | None = None,
    forward: int = 1,
    input: int = 1,
    weight: int = 1,
    hop: int = 0,
    held: int = 100,
) -> Order:
    """Search for the order on a V with the shortest span of a rank, from its first pass to the end of its last one.

    Args:
        stages: p, the ranks; each has two stages.
        microbatches: m.
        limit: microbatches whose activations a rank may hold; p if None, as 1F1B's first rank and ZB-V.
        forward, input, weight: time of F, I and W of a rank's two chunks together, as whole numbers in any unit.
            `penstock show` and `penstock simulate` set them to the times that they are given; whoever calls
            `make_schedule` sets them.
        hop: time of a message, in the same unit.
        held: how much of a microbatch's activations is left between I and W, in percent.

    Raises:
        ScheduleError: `held` is above 100.
    """
    check_percentage("v-auto", held)
    times = {Op.F: forward, Op.I: input, Op.W: weight}  # of a chunk, in halves of the unit
    task = SearchTask(stages, microbatches, times, 2 * hop, 200 * (limit or stages), held)
    best = min(_improved(task), key=lambda order: order.cost)
    placed = zigzag(stages, 2)
    programs = [
        [pass_of(OPS[kind], k, chunks[CHUNKS[kind]]) for kind, k in program]
        for chunks, program in zip(by_rank(placed, stages), best.programs, strict=True)
    ]
    return make_order(programs, stages=placed, window=_window(task, best))


def _improved(task: SearchTask) -> Iterator[OrderOnV]:
    """Orders of which one is the best that is found."""
    work = 2 * task.microbatches * sum(task.times.values())
    known = _best(_known(task), 1)
    yield from known
    if known and known[0].cost[0] == work:
        return  # no rank ever waits
    found = _best([*_squeezed(task), *known], _REORDERED)
    trials = _MOVED // (PERIOD * task.ranks * task.microbatches)
    left = trials
    for order in found:
        better, unused = reordered(task, order, min(left, 1 + trials // 6))
        left -= min(left, 1 + trials // 6) - unused
        yield better


def _known(task: SearchTask) -> Iterator[OrderOnV]:
    """The orders for equal times, where memory allows them."""
    for order in (zb_v, v_half, v_min):
        kinds = {(op, chunk): kind for kind, (op, chunk) in enumerate(zip(OPS, CHUNKS, strict=True))}
        programs = [
            [(kinds[a.op, int(a.stage.index >= task.ranks)], a.unit.first) for a in program.period]
            for program in order(task.ranks, task.microbatches).programs
        ]
        found = timed(task, programs) if all(fits(task, program) for program in programs) else None
        if found is not None:
            yield found


def _squeezed(task: SearchTask) -> Iterator[OrderOnV]:
    """Orders from building blocks."""
    few = replace(task, microbatches=min(task.microbatches, task.ranks + 4))
    equal = replace(task, times=dict.fromkeys(task.times, 1), hop=0)

    def span(block: Block) -> tuple[float, ...]:
        found = timed(few, push_together(few, block, *_SQUEEZES[0]))
        return found.cost if found is not None else (math.inf,)

    tried: list[tuple[OrderOnV, Block]] = []
    for block in sorted(building_blocks(task.ranks), key=span)[:_BLOCKS]:
        for times in (task, equal):
            found = timed(task, push_together(times, block, *_SQUEEZES[0]))
            if found is not None:
                tried.append((found, block))
    tried.sort(key=lambda item: item[0].cost)
    yield from (order for order, _ in tried)
    for block in islice(dict.fromkeys(block for _, block in tried), _FURTHER):
        for squeeze in _SQUEEZES[1:]:
            found = timed(task, push_together(task, block, *squeeze))
            if found is not None:
                yield found


def _best(orders: Iterable[OrderOnV], count: int) -> list[OrderOnV]:
    """The best of those that differ."""
    different = {str(order.programs): order for order in orders}
    return sorted(different.values(), key=lambda order: order.cost)[:count]


def _window(task: SearchTask, order: OrderOnV) -> int:
    """Messages that are under way on a lane when one is taken, where ranks run far ahead of each other."""
    most = WINDOW
    for s, sources in enumerate(sources_of(task, order.ends)):
        for kind in range(F0, I0 + 1):
            source = sources[kind]
            if source is None:
                continue
            for k, end in enumerate(order.ends[s][kind]):
                begin = end - task.times[OPS[kind]]
                most = max(most, sum(sent <= begin for sent in source[0]) - k)
    return most


# Makes an order on a V shorter by moving passes into gaps: the last step of Qi et al., arXiv 2405.15362.
#
# Where a rank waits for a pass, one that comes later on this rank may be run before it, if that takes no more memory
# than there is, and makes the longest span of a rank shorter; then the makespan; then all passes together earlier.
# The paper moves passes in units of slots, here they have their times.


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
