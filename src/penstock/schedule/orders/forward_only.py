"""Forward passes alone: evaluation. Each activation dies as soon as its output has been handed on."""

from penstock.schedule.ir import Kind, Op, straight
from penstock.schedule.order import Order, make_order, pass_of


def forward_only(stages: int, microbatches: int) -> Order:
    """F0 .. F(m-1) on every rank, on evaluation units."""
    return make_order([[pass_of(Op.F, k, node, Kind.EVAL) for k in range(microbatches)] for node in straight(stages)])
