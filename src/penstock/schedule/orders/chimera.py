"""Chimera (Li and Hoefler, arXiv 2107.06925): f pipelines down and f up over the same ranks, each with a copy of the
model.

Down, cut c lies on rank c, up on rank p - 1 - c (with f pairs, each pair turned on by p / f ranks). Each pipeline takes
p / (2f) microbatches of a unit of p. With f = 1 and F = B the passes of microbatch i of a unit stand in the slots

    down, rank r: F at 2i + r, B at 2i + 2p - 1 - r        up, rank r: F at 2i + p - 1 - r, B at 2i + p + r

which never coincide; units follow each other, 2p slots apart. Where backwards take longer, gaps in the middle of a unit
stay open. Gradients of the copies of a cut are added before its update.

p=4, m=4 (> is down, < up):
    r0: F0> F1> F2< B2< F3< B3< B0> B1>
    r1: F0> F2< F1> F3< B2< B0> B3< B1>
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.ir import Node, Op
from penstock.schedule.order import Order, make_order, pass_of


def chimera(stages: int, microbatches: int) -> Order:
    """Chimera with one pipeline down and one up.

    Raises:
        ScheduleError: an odd number of stages.
    """
    if stages % 2:
        raise ScheduleError(f"chimera takes an even number of stages, got {stages}")
    nodes = tuple(
        Node(cut, replica, stages - 1 - cut if replica else cut) for replica in (0, 1) for cut in range(stages)
    )
    half = stages // 2
    slots: list[list[tuple[int, Op, int, Node]]] = [[] for _ in range(stages)]
    for k in range(microbatches):
        unit, place = divmod(k, stages)
        way, i = divmod(place, half)
        for node in nodes[way * stages : (way + 1) * stages]:
            begin = 2 * stages * unit + 2 * i + node.cut
            slots[node.rank].append((begin, Op.F, k, node))
            slots[node.rank].append((begin + 2 * (stages - node.cut) - 1, Op.B, k, node))
    return make_order([[pass_of(op, k, node) for _, op, k, node in sorted(here)] for here in slots], nodes=nodes)
