"""1F1B: after a warm-up of forwards, one forward and one backward in turn.

The family has one knob, the warm-up of rank r among p: the forwards it runs ahead of its backwards.

    p - 1 - r        plain: DAPPLE's P_A (Fan et al., arXiv 2007.01045), PipeDream-Flush (arXiv 2006.09503, sec. 3.2);
                     p - r microbatches in flight.
    2 (p - 1 - r)    eager: DAPPLE's P_B; 2 (p - r) - 1 in flight, which hides the latency of slow links.

p=3, m=4, plain:
    r0: F0 F1 F2 B0 F3 B1 B2 B3
    r1: F0 F1 B0 F2 B1 F3 B2 B3
    r2: F0 B0 F1 B1 F2 B2 F3 B3

Endless (PipeDream, PipeDream-2BW): no drain between batches. The period of batch t holds its m forwards, and each
forward is followed by the backward of the microbatch `warm-up` places earlier, which may be of batch t-1:
    r0: F0 B-2 F1 B-1 F2 B0 F3 B1, and to drain B-2 B-1
"""

from collections.abc import Iterator

from penstock.schedule.ir import Action, Node, Op, straight
from penstock.schedule.order import Order, make_order, pass_of


def one_f_one_b(stages: int, microbatches: int) -> Order:
    """Plain 1F1B, flushed after each batch."""
    return make_order([list(_flushed(node, stages - 1 - node.rank, microbatches)) for node in straight(stages)])


def eager_1f1b(stages: int, microbatches: int) -> Order:
    """Eager 1F1B (DAPPLE's P_B), flushed after each batch."""
    return make_order([list(_flushed(node, 2 * (stages - 1 - node.rank), microbatches)) for node in straight(stages)])


def endless_1f1b(stages: int, microbatches: int) -> Order:
    """Plain 1F1B without flushes."""
    return _endless(stages, microbatches, 1)


def endless_eager_1f1b(stages: int, microbatches: int) -> Order:
    """Eager 1F1B without flushes."""
    return _endless(stages, microbatches, 2)


def _flushed(node: Node, warm_up: int, microbatches: int) -> Iterator[Action]:
    for k in range(microbatches + warm_up):
        if k < microbatches:
            yield pass_of(Op.F, k, node)
        if 0 <= k - warm_up < microbatches:
            yield pass_of(Op.B, k - warm_up, node)


def _endless(stages: int, microbatches: int, factor: int) -> Order:
    nodes = straight(stages)
    ahead = [factor * (stages - 1 - node.rank) for node in nodes]
    periods = [
        [a for k in range(microbatches) for a in (pass_of(Op.F, k, node), pass_of(Op.B, k - warm_up, node))]
        for node, warm_up in zip(nodes, ahead, strict=True)
    ]
    epilogues = [
        [pass_of(Op.B, k, node) for k in range(-warm_up, 0)] for node, warm_up in zip(nodes, ahead, strict=True)
    ]
    return make_order(periods, epilogues)
