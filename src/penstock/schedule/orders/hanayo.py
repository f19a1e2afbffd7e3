"""Hanayo (Liu et al., arXiv 2308.15762): W waves; each passes over the ranks and back.

Stages lie in zigzag, 2W of them on each rank, so the folds need no message. One copy of the weights does what Chimera
needs two for. The paper gives no table; the order is what a greedy list scheduler makes of it (`greedy`)."""

from __future__ import annotations

from penstock.schedule.ir.order import Order, make_order
from penstock.schedule.ir.placement import zigzag
from penstock.schedule.orders.list_scheduling import greedy


def hanayo(stages: int, microbatches: int, *, waves: int = 1, backward: int = 2, in_flight: int | None = None) -> Order:
    """Run 2W stages per rank in zigzag, in the order of a greedy list scheduler.

    Args:
        stages: p, the ranks.
        microbatches: m.
        waves: W; 2W stages per rank.
        backward: time of a backward as a multiple of that of a forward; the order depends on it.
        in_flight: microbatches in flight at once; 2p if None. Fewer cost time where m > p, more cost memory.
    """
    placed = zigzag(stages, 2 * waves)
    ways, urgency = dict.fromkeys(range(microbatches), placed), {k: k for k in range(microbatches)}
    programs = greedy(ways, urgency, backward=backward, in_flight=in_flight or 2 * stages)
    return make_order(programs, stages=placed)
