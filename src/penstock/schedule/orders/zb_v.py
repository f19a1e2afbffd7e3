"""Two chunks per rank on a V: stages r and 2p - 1 - r lie on rank r, so that what goes in first comes out on the same
rank.

ZB-V (Qi et al., arXiv 2401.10241, sec. 6): no bubble within a rank where F = I = W and m >= 2p, with the memory of
1F1B's first rank on every rank. The ranks still begin and end at different times, so (p-1)F/2 are idle in all. Below 2p
microbatches the order is that of 2p - 1 without those that are not there, as in torch's table, and a rank waits F for
each: in all max((p-1)/2, 2p-1-m) F, which is (p-1)F at m = p.

With n > p microbatches in flight the order is that of n ranks, of which r (n-1)/(p-1) is there for each r, and the
others are not: a message that takes their passes' time, F for each rank between two, comes in time. So n = 1 + (p-1) k
hides messages of (k-1) F, and each rank holds n microbatches.

p=2, m=4 (lower case is chunk 1):
    r0: F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
    r1: F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.ir.arrays import ActionArrays, ArrayOrder, F, I, Numbers, ProgramArrays, W
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.placement import by_rank, zigzag
from penstock.schedule.ir.schedule import Stage


def zb_v(stages: int, microbatches: int, *, in_flight: int | None = None) -> Order:
    """ZB-V: each rank holds at most p microbatches and idles for none of its own time where F = I = W and m >= 2p.

    Args:
        stages: p, the ranks; each has two stages.
        microbatches: m.
        in_flight: n, the microbatches that each rank holds at most; p if None. More hide messages.
    """
    placed, n = zigzag(stages, 2), in_flight or stages
    programs = [
        _numbered(
            _phases(-(-rank * (n - 1) // max(stages - 1, 1)), n, max(2 * n - 1, microbatches)), held, microbatches
        )
        for rank, held in enumerate(by_rank(placed, stages))
    ]
    return ArrayOrder.of(programs, placed)


def _phases(rank: int, stages: int, count: int) -> Numbers:
    """Return rows of (operation, chunk): the seven phases of ZB-V on one of so many ranks, for `count` microbatches."""
    first, second = [(I, 0), (W, 0)], [(F, 1), (I, 1), (W, 1)]
    forwards, turns = 2 * stages - rank - 1, count - stages  # in the first two phases; in the steady one
    steady = np.tile([(F, 0), *first, *second], (turns, 1))
    beyond = 6 * np.arange(max(count - forwards, 0), turns)  # forwards that are no more
    phases: list[tuple[list[tuple[int, int]], int]] = [
        ([(F, 0)], 2 * (stages - rank) - 1),
        ([(F, 1), (F, 0)], rank),
        (second, stages - rank),
    ]
    drain: list[tuple[list[tuple[int, int]], int]] = [([(I, 0), (I, 1)], rank), (first, stages - rank)]
    parts = [np.tile(pattern, (times, 1)) for pattern, times in phases]
    parts += [np.delete(steady, beyond, axis=0), *(np.tile(pattern, (times, 1)) for pattern, times in drain)]
    done = [sum(int(((p[:, 0] == W) & (p[:, 1] == chunk)).sum()) for p in parts if len(p)) for chunk in (0, 1)]
    parts += [np.tile([(W, chunk)], (count - done[chunk], 1)) for chunk in (1, 0)]
    return np.concatenate([part.reshape(-1, 2) for part in parts])


def _numbered(kinds: Numbers, held: list[Stage], microbatches: int) -> ProgramArrays:
    """Give the passes of each kind the numbers of microbatches in order, and leave out those from m on."""
    first = np.empty(len(kinds), dtype=np.int64)
    for op in (F, I, W):
        for chunk in (0, 1):
            here = np.flatnonzero((kinds[:, 0] == op) & (kinds[:, 1] == chunk))
            first[here] = np.arange(len(here))
    indices = np.array([stage.index for stage in held])
    return ProgramArrays(ActionArrays.of(kinds[:, 0], indices[kinds[:, 1]], first)[first < microbatches])
