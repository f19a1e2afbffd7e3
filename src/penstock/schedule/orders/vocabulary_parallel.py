"""1F1B with the output layer divided among all ranks along the vocabulary (Yeung et al., arXiv 2411.05288).

Stages 0 to p - 1 hold the layers, one per rank; stages p to 2p - 1 hold a part of the output layer each, one per rank;
stage 2p, on the last rank, makes the loss of what the parts know of each token. So all parts wait for the last layer,
the loss for all parts, and the backward of the last layer for those of all parts. These are the two barriers of the
paper's Algorithm 1, and like there they cost two more microbatches in flight than 1F1B has.

Each rank repeats the forward of a layer, the forward and the backward of its part, and the backward of a layer, each of
an older microbatch than the one before where that cannot have arrived sooner.

p=2, m=3 (S, T: forward and backward of a part; L, l: those of the loss):
    r0: F0 F1 S0 F2 S1 T0 S2 T1 B0 T2 B1 B2
    r1: F0 S0 F1 S1 L0 l0 T0 F2 S2 L1 l1 T1 B0 L2 l2 T2 B1 B2
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.schedule import Action, Edge, Op, Stage, chain

_FORWARD, _BACKWARD = 1, 2
_ROUND = _FORWARD + _BACKWARD
"""Times of a layer by which rounds are laid out. Parts take none: larger ones change which pass waits, not for what."""


class _Lags(NamedTuple):
    """By how many rounds passes of a rank come after the forward of the same microbatch.

    Attributes:
        part: the forward of its part of the output layer.
        part_back: the backward of that.
        back: the backward of its layers.
    """

    part: int
    part_back: int
    back: int


def vocabulary_1f1b(stages: int, microbatches: int) -> Order:
    """Run 1F1B on the layers, and the parts of the output layer in between.

    Args:
        stages: p, the ranks; there are 2 p + 1 stages.
        microbatches: m.
    """
    layers = [Stage(rank, 0, rank) for rank in range(stages)]
    parts = [Stage(stages + rank, 0, rank) for rank in range(stages)]
    loss = Stage(2 * stages, 0, stages - 1)
    spread = [Edge(stages - 1, part.index) for part in parts]
    joined = [Edge(part.index, loss.index) for part in parts]
    lags, loss_lag = _lags(stages)
    rounds = microbatches + lags[0].back
    programs: list[list[Action]] = []
    for rank in range(stages):
        turns = [(Op.F, layers[rank], 0), (Op.F, parts[rank], lags[rank].part)]
        if rank == stages - 1:
            turns += [(Op.F, loss, loss_lag), (Op.B, loss, loss_lag)]
        turns += [(Op.B, parts[rank], lags[rank].part_back), (Op.B, layers[rank], lags[rank].back)]
        programs.append(
            [
                pass_of(op, turn - lag, stage)
                for turn in range(rounds)
                for op, stage, lag in turns
                if 0 <= turn - lag < microbatches
            ]
        )
    return make_order(programs, stages=(*layers, *parts, loss), edges=(*chain(stages), *spread, *joined))


def _lags(stages: int) -> tuple[list[_Lags], int]:
    """Return the lags of each rank, and that of the loss.

    Rank r begins its round i at the time 3 i + r, and is at its part at 3 i + r + 1. The last layer's output is there
    at p. From there the passes of every rank take the first round in which they find what they need.
    """
    ranks = range(stages)
    there = [rank + _FORWARD for rank in ranks]  # in round 0 a rank is at its part, then

    def first(rank: int, time: int) -> int:
        return max(-((there[rank] - time) // _ROUND), 0)

    part = [first(rank, stages * _FORWARD) for rank in ranks]
    loss = first(stages - 1, max(lag * _ROUND + at for lag, at in zip(part, there, strict=True)))
    part_back = [first(rank, loss * _ROUND + there[-1]) for rank in ranks]
    back, time = [0] * stages, max(lag * _ROUND + at for lag, at in zip(part_back, there, strict=True))
    for rank in reversed(ranks):
        back[rank] = first(rank, time)
        time = back[rank] * _ROUND + there[rank] + _BACKWARD
    return [_Lags(*each) for each in zip(part, part_back, back, strict=True)], loss
