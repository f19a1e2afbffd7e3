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

from penstock.schedule.ir.in_flight_option import InFlight, in_flight_on
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, looped
from penstock.schedule.ir.schedule import Action, Op, Stage, straight
from penstock.schedule.orders.interleaved import ahead_on, groups_of, passes_in_turns


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
