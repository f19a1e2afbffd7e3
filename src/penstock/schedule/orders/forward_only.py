"""Forward passes alone: evaluation. Each activation dies as soon as its output has been handed on."""

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank
from penstock.schedule.ir.schedule import Edge, Kind, Op, Stage, chain, straight


def forward_only(stages: int, microbatches: int) -> Order:
    """F0 .. F(m-1) on every rank, on evaluation units."""
    return forward_through(straight(stages), chain(stages), stages, microbatches)


def forward_through(placed: tuple[Stage, ...], edges: tuple[Edge, ...], ranks: int, microbatches: int) -> Order:
    """The same for every placement: as many microbatches as there are ranks go through the stages of a rank in turn."""
    groups = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    programs = [
        [pass_of(Op.F, k, stage, Kind.EVAL) for group in groups for stage in held for k in group]
        for held in by_rank(placed, ranks)
    ]
    return make_order(programs, stages=placed, edges=edges)
