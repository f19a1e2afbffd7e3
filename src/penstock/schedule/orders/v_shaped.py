"""Two chunks per rank on a V: stages r and 2p - 1 - r lie on rank r, so that what goes in first comes out on the same
rank.

ZB-V (Qi et al., arXiv 2401.10241, sec. 6): no bubble within a rank where F = I = W and m >= 2p, with the memory of
1F1B's first rank on every rank. The ranks still begin and end at different times, so (p-1)F/2 are idle in all. Below 2p
microbatches the order is that of 2p - 1 without those that are not there, as in torch's table, and a rank waits F for
each: in all max((p-1)/2, 2p-1-m) F, which is (p-1)F at m = p.

p=2, m=4 (lower case is chunk 1):
    r0: F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
    r1: F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
"""

from __future__ import annotations

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank, zigzag
from penstock.schedule.ir.schedule import Action, Op, Stage


def zb_v(stages: int, microbatches: int) -> Order:
    """ZB-V: each rank holds at most p microbatches and idles for none of its own time where F = I = W and m >= 2p.

    Args:
        stages: p, the ranks; each has two stages.
        microbatches: m.
    """
    placed = zigzag(stages, 2)
    programs = [_PassQueue(held, microbatches).zb_v(rank, stages) for rank, held in enumerate(by_rank(placed, stages))]
    return make_order(programs, stages=placed)


class _PassQueue:
    """Lists the passes of a rank, each kind in microbatch order; passes of microbatches from m on are left out."""

    def __init__(self, held: list[Stage], microbatches: int) -> None:
        self._held, self._m = held, microbatches
        self._found: list[Action] = []
        self._next = {(op, chunk): 0 for op in (Op.F, Op.I, Op.W) for chunk in (0, 1)}

    def add(self, *passes: tuple[Op, int]) -> None:
        """The next pass of each kind."""
        for op, chunk in passes:
            k = self._next[op, chunk]
            self._next[op, chunk] += 1
            if k < self._m:
                self._found.append(pass_of(op, k, self._held[chunk]))

    def zb_v(self, rank: int, stages: int) -> list[Action]:
        """The seven phases of ZB-V."""
        count = max(2 * stages - 1, self._m)  # microbatches, some of which vanish
        first, second = ((Op.I, 0), (Op.W, 0)), ((Op.F, 1), (Op.I, 1), (Op.W, 1))
        for _ in range(2 * (stages - rank) - 1):
            self.add((Op.F, 0))
        for _ in range(rank):
            self.add((Op.F, 1), (Op.F, 0))
        for _ in range(stages - rank):
            self.add(*second)
        while self._next[Op.F, 1] < count:
            if self._next[Op.F, 0] < count:
                self.add((Op.F, 0))
            self.add(*first, *second)
        for _ in range(rank):
            self.add((Op.I, 0), (Op.I, 1))
        for _ in range(stages - rank):
            self.add(*first)
        for chunk in (1, 0):
            while self._next[Op.W, chunk] < count:
                self.add((Op.W, chunk))
        return self._found
