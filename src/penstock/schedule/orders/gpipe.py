"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards.

p=3, m=3:
    r0: F0 F1 F2 .. .. .. .. B0 B1 B2
    r1: .. F0 F1 F2 .. .. B0 B1 B2
    r2: .. .. F0 F1 F2 B0 B1 B2

Backwards run first in, first out, so that gradients accumulate in microbatch order; the makespan
(m + p - 1)(F + B) is that of the reversed order, too. Every rank holds m activations.
"""

from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.schedule import Op, straight


def gpipe(stages: int, microbatches: int) -> Order:
    """Run F0 .. F(m-1) B0 .. B(m-1) on every rank."""
    return make_order(
        [[pass_of(op, k, stage) for op in (Op.F, Op.B) for k in range(microbatches)] for stage in straight(stages)]
    )
