"""Zero bubble (Qi et al., arXiv 2401.10241): the backward in two halves, of which one fills the gaps.

I, the backward for the inputs, is what the rank before waits for; W, the one for the weights, can wait itself. Rank r
puts W off by so many backwards that nobody idles for it:

    H1   1F1B with W put off by r; as much memory as 1F1B on the first rank, on every rank; bubble (p - 1)(F + I - W).
    H2   2 (p - r) - 1 forwards ahead and W put off by 2 r; no bubble within a rank where F = I = W, but every rank
         begins and ends at another time: the update must not wait for all ranks (post-validation).

p=3, m=4:
    H1  r0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3          H2  r0: F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3
        r1: F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3              r1: F0 F1 F2 I0 F3 I1 I2 W0 I3 W1 W2 W3
        r2: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3              r2: F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

With several chunks per rank, H1 in Megatron's interleaved order: (v - 1) g + p - r forwards ahead.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

from penstock.errors import ScheduleError
from penstock.schedule.ir.in_flight_option import InFlight, in_flight_on
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, looped
from penstock.schedule.ir.schedule import WINDOW, Action, Op, Stage, straight
from penstock.schedule.orders.interleaved import ahead_on, groups_of, passes_in_turns
from penstock.schedule.orders.zb_progress import Rank, SearchTask, input_at, place, replay


def zb_h1(stages: int, microbatches: int, *, in_flight: InFlight | None = None) -> Order:
    """ZB-H1: at most p microbatches on every rank and, where F = I = W, a third of 1F1B's bubble (sec. 2).

    Args:
        stages: p, the ranks.
        microbatches: m.
        in_flight: forwards ahead on the first rank, or on each (`in_flight_on`); p - r if None; with 2 p - 1 on the
            first it is ZB-H2. A rank puts as many W off as it has fewer of them than the first: all need equal memory.
    """
    ahead = in_flight_on(stages, stages if in_flight is None else in_flight)
    return make_order(
        [
            _put_off(*_passes(stage, microbatches), ahead[stage.rank], ahead[0] - ahead[stage.rank])
            for stage in straight(stages)
        ]
    )


def zb_h2(stages: int, microbatches: int, *, in_flight: InFlight | None = None) -> Order:
    """ZB-H2: at most 2p - 1 microbatches on every rank and, where F = I = W, no bubble within a rank (sec. 2).

    Args:
        stages: p, the ranks.
        microbatches: m.
        in_flight: as of `zb_h1`; 2 p - 1 if None.
    """
    return zb_h1(stages, microbatches, in_flight=2 * stages - 1 if in_flight is None else in_flight)


def zb_interleaved(
    stages: int, microbatches: int, *, chunks: int = 2, group: int | None = None, in_flight: int | None = None
) -> Order:
    """ZB-H1 with several chunks per rank, in Megatron's interleaved order.

    Args:
        stages: p, the ranks.
        microbatches: m.
        chunks: v, stages per rank.
        group: g, the microbatches that go through the chunks together; p if None.
        in_flight: forwards of chunks ahead on the first rank, (v - 1) g + p if None; the last rank has (v - 1) g + 1,
            those between them go down evenly. A rank puts as many W off as it has fewer of them than the first.
    """
    placed, groups = looped(stages, chunks), groups_of(stages, microbatches, group)
    last = (chunks - 1) * len(groups[0]) + 1
    ahead = ahead_on(stages, last, stages - 1 if in_flight is None else in_flight - last)
    programs = []
    for rank, held in enumerate(by_rank(placed, stages)):
        forwards, backwards = passes_in_turns(held, groups, Op.I)
        programs.append(_put_off(forwards, backwards, ahead[rank], ahead[0] - ahead[rank]))
    return make_order(programs, stages=placed)


def _passes(stage: Stage, microbatches: int) -> tuple[list[Action], list[Action]]:
    return [pass_of(Op.F, k, stage) for k in range(microbatches)], [
        pass_of(Op.I, k, stage) for k in range(microbatches)
    ]


def _put_off(forwards: list[Action], backwards: list[Action], ahead: int, late: int) -> list[Action]:
    """`ahead` forwards; then each I, with the W of `late` backwards before, lets the next forward in."""
    found, weights = list(forwards[:ahead]), [backward._replace(op=Op.W) for backward in backwards]
    for k, backward in enumerate(backwards):
        found += [backward, *weights[max(k - late, 0) : max(k - late + 1, 0)], *forwards[ahead + k : ahead + k + 1]]
    return found + weights[max(len(weights) - late, 0) :]


# Zero-bubble orders searched for given times and memory: ZB-1p and ZB-2p (Qi et al., arXiv 2401.10241, sec. 3.1 and
# app. G).
#
# The search plays the ranks through time. Each rank that is free runs, in this order,
#
#     I   if its gradient is there, unless it has just run one and a forward can go on;
#     F   if its input is there and memory allows;
#     W   if nothing else can begin before it would be over, or if the rank, waiting, would become the one that has
#         idled most, or if memory is full.
#
# Three yes-or-no choices remain open, all eight combinations are tried, and the one with the shortest span wins:
# whether a forward of the warm-up may hold up the first I; whether a rank may be more than one forward further than the
# next one; whether W fills gaps that are too short for it. H1 and H2 are tried as well, where memory allows them. Our
# own heuristic after the paper's description.
#
# p=2, m=4, all times equal, at most 2 microbatches on a rank (ZB-1p) and at most 4 (ZB-2p):
#     r0: F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3       r0: F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3
#     r1: F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3       r1: F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3


def zb_auto(
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
    """Search for the order with the shortest span of a rank, from its first pass to the end of its last one.

    Args:
        stages: p, the ranks.
        microbatches: m.
        limit: microbatches whose activations a rank may hold; 2p if None (ZB-2p), p for ZB-1p.
        forward, input, weight: time of F, I and W of a rank, as whole numbers in any unit. `penstock show` and
            `penstock simulate` set them to the times that they are given; `make_schedule` takes them as options.
        hop: time of a message, in the same unit. If there is any, lanes get as much room as the ranks are ahead of each
            other then, in a run, too; without, what is found for any order.
        held: how much of a microbatch's activations is left between I and W, in percent.

    Raises:
        ScheduleError: `held` is above 100.
    """
    check_percentage("zb-auto", held)
    times = {Op.F: forward, Op.I: input, Op.W: weight}
    task = SearchTask(stages, microbatches, times, hop, 100 * (limit or 2 * stages), held)
    tried = [_search(task, *choices) for choices in product((False, True), repeat=3)]
    for known in (zb_h1(stages, microbatches), zb_h2(stages, microbatches)):
        ranks = replay(task, [program.period for program in known.programs])
        tried += [ranks] if max(rank.most for rank in ranks) <= task.limit else []
    best = min(tried, key=lambda ranks: max(rank.span for rank in ranks))
    return make_order([rank.found for rank in best], window=_window(task, best) if hop else None)


def _window(task: SearchTask, ranks: list[Rank]) -> int:
    """Messages that are under way on a lane when one is taken, where the search has let ranks run far ahead."""
    most = WINDOW
    for op, pairs in ((Op.F, pairwise(ranks)), (Op.I, pairwise(reversed(ranks)))):
        for source, target in pairs:
            for k, end in enumerate(target.ends[op]):
                begin = end - task.times[op]
                most = max(most, sum(sent <= begin for sent in source.ends[op]) - k)
    return most


def check_percentage(order: str, held: int) -> None:
    """Refuse that more of a microbatch's activations is left after I than was there before.

    Raises:
        ScheduleError: `held` is no percentage.
    """
    if held > 100:
        raise ScheduleError(
            f"{order}: held is a percentage of a microbatch's activations, got {held}; set it to what is left of them "
            "between the backward for the inputs and that for the weights, at most 100"
        )


def _search(task: SearchTask, eager: bool, far: bool, thrifty: bool) -> list[Rank]:
    """One run of the heuristic."""
    ranks, placed, m = [Rank() for _ in range(task.ranks)], straight(task.ranks), task.microbatches

    def arrival(s: int, op: Op) -> float:
        """When the next F or I of a rank can begin; infinite while nobody knows."""
        k = ranks[s].done(op)
        if k == m or (op is Op.I and k == ranks[s].done(Op.F)):
            return math.inf
        if op is Op.F and (ranks[s].memory + 100 > task.limit or (not far and s + 1 < task.ranks and _ahead(ranks, s))):
            return math.inf
        return input_at(task, ranks, s, op)

    def choose(s: int, now: float) -> Op | None:
        """What a free rank does now; None if it waits."""
        rank, f, i = ranks[s], arrival(s, Op.F), arrival(s, Op.I)
        first = not rank.done(Op.I)
        held_up = first and not eager and i < now + task.times[Op.F]
        if f <= now and not held_up and (i > now or first or rank.found[-1].op is not Op.F):
            return Op.F
        if i <= now:
            return Op.I
        if rank.done(Op.W) == rank.done(Op.I):
            return None
        gap = min(f, i) - now
        behind = thrifty and rank.idle + gap >= max(other.idle for other in ranks)
        return Op.W if gap >= task.times[Op.W] or behind or rank.memory + 100 > task.limit else None

    now = 0.0
    while any(rank.done(Op.W) < m for rank in ranks):
        moved = True
        while moved:
            moved = False
            for s in reversed(range(task.ranks)):
                op = choose(s, now) if ranks[s].free <= now else None
                if op is not None:
                    place(task, ranks[s], pass_of(op, ranks[s].done(op), placed[s]), now)
                    moved = True
        times = [rank.free for rank in ranks] + [arrival(s, op) for s in range(task.ranks) for op in (Op.F, Op.I)]
        now = min((time for time in times if now < time < math.inf), default=math.inf)
        if now == math.inf:
            raise AssertionError(f"zb-auto: no rank can go on after {[len(rank.found) for rank in ranks]} passes")
    return ranks


def _ahead(ranks: list[Rank], s: int) -> bool:
    """Whether a rank that has begun its backwards holds more than one microbatch more than the next one."""
    return ranks[s].done(Op.I) > 0 and ranks[s].done(Op.F) > ranks[s + 1].done(Op.F) + 1
