"""One microbatch at a time through all stages: no overlap, the least memory, the reference for everything else.

p=2, m=2:
    r0: F0 .. B0 F1 .. B1
    r1: .. F0 .. .. F1 ..    (its backwards follow at once)
"""

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.schedule import Op, straight


def sequential(stages: int, microbatches: int) -> Order:
    """Run F0 B0 F1 B1 ... on every rank."""
    return make_order(
        [[pass_of(op, k, stage) for k in range(microbatches) for op in (Op.F, Op.B)] for stage in straight(stages)]
    )
