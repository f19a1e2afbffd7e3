"""WPipe: two groups of stages; in the first, forwards run a batch ahead of backwards.

Source: Yang, Zhang, Zhang, Yang and Wei, "Group-based interleaved pipeline parallelism for large-scale DNN training"
(ICLR 2022); its code (github.com/yangpc615/WPipe, lib/unifieddatainterface.py and lib/callableunit.py) gives the order.

The model is cut into 2p parts. Rank r holds stage r, of group 1, and stage p + r, of group 2. Forwards take all of a
batch through group 1, then all of it through group 2; backwards the other way round; and one of each in turn. Rank r
runs m + p - 1 - r forwards ahead of its backwards, so that the forwards of the next batch in group 1 stand before the
backwards of this one there, and those in group 2 behind them. With the rule stash (2GW, double-grouped weight updates)
group 1 reads weights that are one update old and keeps two versions, group 2 none and one.

p=2, m=2, endless (lower case is group 2; numbers below 0 are of the batch before):
    r0: F0 b-1 F1 B-2 f0 B-1 f1 b0, and to drain b-1 B-2 B-1
    r1: F0 B-2 F1 B-1 f0 b0 f1 b1, and to drain B-2 B-1

The authors take m = p. Any m will do: from m = p - 1 on (where a pass of one kind takes more than half the time of
both, from m (F + B) >= p max(F, B) on) equal stages never wait; below, ranks run at most 2m ahead, so that both groups
still read what they read above (variant "penstock").

    penstock train --file examples/methods/wpipe.py --stages 4
"""

from __future__ import annotations

import penstock
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, looped
from penstock.schedule.ir.schedule import Action, Op, Stage


def wpipe(stages: int, microbatches: int) -> Order:
    """Run WPipe's two groups in turn, without flushes.

    Args:
        stages: p, the ranks.
        microbatches: m.
    """
    m, placed = microbatches, looped(stages, 2)
    periods, epilogues = [], []
    for rank, (first, second) in enumerate(by_rank(placed, stages)):
        ahead = m + min(stages - 1 - rank, m)
        forwards = [pass_of(Op.F, k, stage) for stage in (first, second) for k in range(m)]
        backwards = [_backward(n, m, first, second) for n in range(-ahead, 2 * m - ahead)]
        periods.append([a for pair in zip(forwards, backwards, strict=True) for a in pair])
        epilogues.append([_backward(n, m, first, second) for n in range(-ahead, 0)])
    # The outputs of group 1 wait on their way to rank 0 until it has run its own m forwards of that group.
    return make_order(periods, epilogues, stages=placed)


def _backward(place: int, m: int, first: Stage, second: Stage) -> Action:
    """Return the backward at a position in the sequence, in which batch t has positions 0 to 2m - 1."""
    batch, k = divmod(place, 2 * m)
    return pass_of(Op.B, batch * m + k % m, second if k < m else first)


def delays(stages: int, microbatches: int) -> list[list[int]]:
    """Return the delays of the paper, for the reference: of one update in group 1, of none in group 2."""
    return [[int(stage < stages // 2)] * microbatches for stage in range(stages)]


method = penstock.Method(
    "wpipe",
    "WPipe, two groups of stages of which one has no delay",
    "ICLR 2022 (Yang et al., group-based interleaved pipeline parallelism), and its code",
    order=wpipe,
    rule="stash",
    settings={"max_grad_norm": None},
    delays=delays,
)
