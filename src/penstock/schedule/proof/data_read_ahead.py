"""How far ranks read ahead, so that a batch that one of them cannot read is never begun on any.

Where one rank alone announces batches, the others tell it with the gradients; where several do, in parallel or in
bidirectional pipelines, all hear of it when all stages decide about an update. Either comes back only after
further batches have been begun and announced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.schedule.ir.schedule import Action, Op, Schedule, Stage

_PERIODS = 12  # by then every schedule is in its steady state


class Reading(NamedTuple):
    """How far ranks read ahead.

    Attributes:
        alone: what `batches_ahead` counts for one pipeline.
        together: what it counts for several parallel pipelines.
        overlap: what `batches_overlapping` counts.
    """

    alone: int = 0
    together: int = 0
    overlap: int = 1


def reading_of(schedule: Schedule) -> Reading:
    """Return how far the ranks of a schedule read ahead."""
    return Reading(batches_ahead(schedule), batches_ahead(schedule, width=2), batches_overlapping(schedule))


def batches_ahead(schedule: Schedule, width: int = 1) -> int:
    """Count the batches that a rank reads ahead when it has taken the last sample of a batch.

    The rank of a first stage announces batch b + 1 when it begins batch b. With the result n, it hears of what ranks
    have asked for with batch b before it would announce batch b + n. The result is 0 where it cannot: a first stage has
    no backward, or updates are taken back where they turn out to be wrong.

    Args:
        schedule: of the run.
        width: the number of parallel pipelines, which decide together about every update.
    """
    entrances = [stage for stage in schedule.stages if not schedule.predecessors[stage.index]]
    if len(entrances) * width == 1:
        return _ahead(schedule, entrances[0], _gradients_of(schedule, entrances[0]))
    if any(action.op is Op.VALIDATE for program in schedule.programs for action in program.period):
        return 0
    found = [_ahead(schedule, entrance, _updated) for entrance in entrances]
    return max(found) if all(found) else 0


def batches_overlapping(schedule: Schedule) -> int:
    """Count the batches before a new one that passes may still read when the first rank has its loader make that one.

    That is when it begins the batch before, which counts.
    """
    entrances = [stage for stage in schedule.stages if not schedule.predecessors[stage.index]]
    return max(1, *[_ahead(schedule, entrance, _gradients_of(schedule, entrance)) - 1 for entrance in entrances])


Finished = Callable[[Action, int], int | None]
"""(pass, period) -> the batch of which the rank has heard what others ask for; None where it has not yet."""


def _gradients_of(schedule: Schedule, entrance: Stage) -> Finished:
    """Hear with the last gradient of a batch."""
    of_stage = [p for p in schedule.program(entrance.rank).passes() if p.stage == entrance]
    backwards = sum(p.unit.count for p in of_stage if p.op in (Op.B, Op.I))
    done: dict[int, int] = {}  # backwards, by batch

    def heard(action: Action, t: int) -> int | None:
        if action.op not in (Op.B, Op.I) or action.stage != entrance:
            return None
        for k in action.unit.microbatches:
            batch = k // schedule.microbatches + t
            done[batch] = done.get(batch, 0) + 1
        return batch if done[batch] == backwards else None

    return heard


def _updated(action: Action, t: int) -> int | None:
    """Hear with the first update for a batch, which waits for the decision of all stages."""
    return action.unit.first + t if action.op is Op.STEP else None


def _ahead(schedule: Schedule, entrance: Stage, heard: Finished) -> int:
    """Count for one first stage; 0 if its rank never hears anything."""
    begun, unheard, ahead, finished = -1, 0, 0, set[int]()
    for t in range(_PERIODS):
        for p in schedule.program(entrance.rank).passes():
            batch = heard(p, t)
            if batch is not None:
                finished.add(batch)
            if p.op is not Op.F or p.stage != entrance:
                continue
            for k in p.unit.microbatches:
                batch = k // schedule.microbatches + t
                if batch > begun:
                    while unheard in finished:
                        unheard += 1
                    begun, ahead = batch, max(ahead, batch + 2 - unheard)
    return ahead if finished else 0
