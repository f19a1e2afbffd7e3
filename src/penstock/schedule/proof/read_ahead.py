"""How far ranks behind the first one read ahead, so that a batch that they cannot read is never begun.

They tell the first rank with the gradients, which come back only after further batches have been begun and announced.
"""

from __future__ import annotations

from penstock.schedule.ir.schedule import Op, Schedule, passes

_PERIODS = 12  # by then every schedule is in its steady state


def batches_ahead(schedule: Schedule) -> int:
    """Count the batches that a later rank reads ahead when it has taken the last sample of a batch.

    The first rank announces batch b + 1 when it begins batch b. With the result n, it has all gradients of batch b
    before it would announce batch b + n. The result is 0 where no gradient reaches a rank that alone announces batches:
    with several first stages, or one without a backward.
    """
    entrances = [stage for stage in schedule.stages if not schedule.predecessors[stage.index]]
    if len(entrances) != 1:
        return 0
    of_stage = [
        p for action in schedule.program(entrances[0].rank).period for p in passes(action) if p.stage == entrances[0]
    ]
    backwards = sum(p.unit.count for p in of_stage if p.op in (Op.B, Op.I))
    done: dict[int, int] = {}  # backwards, by batch
    begun, unfinished, ahead = -1, 0, 0
    for t in range(_PERIODS if backwards else 0):
        for p in of_stage:
            for k in p.unit.microbatches:
                batch = k // schedule.microbatches + t
                if p.op in (Op.B, Op.I):
                    done[batch] = done.get(batch, 0) + 1
                elif p.op is Op.F and batch > begun:
                    while done.get(unfinished, 0) == backwards:
                        unfinished += 1
                    begun, ahead = batch, max(ahead, batch + 2 - unfinished)
    return ahead
