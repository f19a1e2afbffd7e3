"""Chimera (Li and Hoefler, arXiv 2107.06925): f pipelines down and f up over the same ranks, each with a copy of the
model.

Down, stage c lies on rank c, up on rank D - 1 - c; each further pair is turned on by D / f ranks. So a rank holds 2f
different stages. A unit of D microbatches is dealt to the 2f pipelines, D / (2f) to each. With F = B the passes of
microbatch i of a pipeline, at stage c, stand in the slots

    F at 2i + c        B at 2i + 2D - 1 - c

which never coincide on a rank, whatever f is: the passes of the pairs follow each other, D / f slots apart, and those
down and up take turns. Units follow each other, 2D slots apart, so D / f - 2 slots are idle, whatever m is.
Where backwards take longer, gaps in the middle of a unit stay open. Gradients of the copies of a stage are added before
its update.

D=4, f=1, m=4 (> is down, < up):
    r0: F0> F1> F2< B2< F3< B3< B0> B1>
    r1: F0> F2< F1> F3< B2< B0> B3< B1>
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.schedule import Op, Stage


def chimera(stages: int, microbatches: int, *, pairs: int = 1) -> Order:
    """Pipelines down (even directions) and up (odd ones) over the same ranks.

    Args:
        stages: D.
        microbatches: m.
        pairs: f, pipelines in each direction; a rank holds 2f stages.

    Raises:
        ScheduleError: 2f does not divide D.
    """
    ways = 2 * pairs
    if stages % ways:
        raise ScheduleError(f"chimera needs a multiple of {ways} stages (two per pair of pipelines), got {stages}")
    placed = tuple(
        Stage(index, way, (way // 2 * stages // pairs + (stages - 1 - index if way % 2 else index)) % stages)
        for way in range(ways)
        for index in range(stages)
    )
    slots: list[list[tuple[int, Op, int, Stage]]] = [[] for _ in range(stages)]
    for k in range(microbatches):
        unit, place = divmod(k, stages)
        size = min(stages, microbatches - unit * stages)  # the rest in the last unit is dealt evenly, too
        way = place * ways // size
        i = place + -way * size // ways
        for stage in placed[way * stages : (way + 1) * stages]:
            begin = 2 * stages * unit + 2 * i + stage.index
            slots[stage.rank].append((begin, Op.F, k, stage))
            slots[stage.rank].append((begin + 2 * (stages - stage.index) - 1, Op.B, k, stage))
    return make_order([[pass_of(op, k, stage) for _, op, k, stage in sorted(here)] for here in slots], stages=placed)
