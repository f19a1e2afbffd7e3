"""Forward passes only, for evaluation: each activation is freed as soon as its output has been sent."""

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.placement import by_rank
from penstock.schedule.ir.schedule import Edge, Kind, Op, Stage, chain, straight


def forward_only(stages: int, microbatches: int) -> Order:
    """Run F0 .. F(m-1) on every rank, on evaluation units."""
    return forward_through(straight(stages), chain(stages), stages, microbatches)


def forward_through(placed: tuple[Stage, ...], edges: tuple[Edge, ...], ranks: int, microbatches: int) -> Order:
    """Run forwards through any placement, as many microbatches at a time as there are ranks."""
    groups = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    programs = [
        [pass_of(Op.F, k, stage, Kind.EVAL) for group in groups for stage in held for k in group]
        for held in by_rank(placed, ranks)
    ]
    return make_order(programs, stages=placed, edges=edges)
