"""BitPipe (Wu et al., arXiv 2410.19367): two V-shaped pipelines in opposite directions, two chunks of each on every
rank.

Half of the microbatches go down and half up, each direction with a copy of the model in 2p stages. Gradients of the
copies of a stage are added before its update. The order is greedy (`greedy`), as the paper's tables are not
published."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.ir.order import Order, make_order
from penstock.schedule.ir.placement import zigzag
from penstock.schedule.orders.list_scheduling import greedy


def bitpipe(stages: int, microbatches: int, *, backward: int = 2, in_flight: int | None = None) -> Order:
    """Two V-shaped pipelines in opposite directions, with one chunk of each direction's V on the way down and up.

    Args:
        stages: p, the ranks.
        microbatches: m.
        backward: time of a backward as a multiple of that of a forward; the order depends on it.
        in_flight: microbatches in flight at once in each direction; p if None.

    Raises:
        ScheduleError: an odd number of ranks or of microbatches.
    """
    if stages % 2 or microbatches % 2:
        raise ScheduleError(
            f"bitpipe needs an even number of stages and of microbatches, got {stages} and {microbatches}"
        )
    down, up = zigzag(stages, 2), zigzag(stages, 2, direction=1, reverse=True)
    half = microbatches // 2
    ways = {k: down if k < half else up for k in range(microbatches)}
    urgency = {k: k % half for k in range(microbatches)}
    programs = greedy(ways, urgency, backward=backward, in_flight=in_flight or stages)
    return make_order(programs, stages=(*down, *up))
