"""Finds out whether something may be run between two batches on every rank without draining the pipeline.

The border of a batch is, on each rank, the place directly before its first forward. Forward-only passes that every rank
runs there cannot block if nothing that stands before the border on one rank waits for what stands behind it on another,
and if no more messages cross it than may be outstanding on their lane. With rules that place the updates there (or
flush), all stages have then the same newest version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.schedule.ir.schedule import Action, Kind, Op, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Placing
from penstock.schedule.machine.instructions import Instruction, LaneKey, Lowered


def border_fault(lowered: Lowered) -> str | None:
    """Say why nothing may be run at the borders of batches; None if it may.

    A fault is no defect of the schedule: it says that the pipeline must be drained first.
    """
    schedule, m = lowered.schedule, lowered.schedule.microbatches
    if RULES[schedule.rule].step not in (Placing.END, Placing.LATE):
        return f"with rule {schedule.rule!r} stages have different newest versions where a batch begins"
    if RULES[schedule.rule].provisional:
        return f"with rule {schedule.rule!r} the newest versions are not decided on yet where a batch begins"
    if schedule.sharding.level is Level.FULL and RULES[schedule.rule].step is Placing.LATE:
        return "with sharding full the rows of the newest version are made only after a batch has begun"
    borders = [_border(lowered, rank) for rank in range(schedule.ranks)]
    for rank, plain in enumerate(schedule.programs):
        if RULES[schedule.rule].step is not Placing.LATE:
            continue
        if schedule.sharding.level is not Level.NONE:  # a version counts from where it is whole, before it is read
            if not _updates_behind(plain.period) or len(schedule.on_rank(rank)) > 1:
                return f"with sharding, rank {rank} may complete a version only after another stage has begun the batch"
        elif _updates_behind(plain.period):
            return f"rank {rank} has stages that are updated only after another one of its stages has begun the batch"
    sent: dict[tuple[int, int], int] = {}  # route and microbatch, in the sender's period -> position
    for program in lowered.programs:
        for position, (action, route, *_) in enumerate(program.period):
            if action.op is Op.SEND:
                sent[route, action.unit.first] = position
    crossing: Counter[LaneKey] = Counter()
    for rank, program in enumerate(lowered.programs):
        for position, instruction in enumerate(program.period):
            for route, first in instruction.needs:
                source = lowered.routes[route].source.rank
                lag = 0
                while (route, first + lag * m) not in sent:
                    lag += 1
                early = sent[route, first + lag * m] < borders[source]
                if not lag and position < borders[rank] and not early:
                    return (
                        f"rank {rank} needs {lowered.routes[route].payload} {first} before a batch begins, and rank "
                        f"{source} sends it afterwards"
                    )
                late = position >= borders[rank]
                inside = max(lag - 1, 0) + (late + early if lag else late and early)
                crossing[lowered.routes[route].lane] += int(inside)
    full = next((lane for lane, count in crossing.items() if count > lowered.window), None)
    return None if full is None else f"{crossing[full]} messages are under way on {full} where a batch begins"


def _updates_behind(period: Sequence[Action]) -> bool:
    """Whether an update stands behind the first forward of the period's own batch."""
    places = [i for i, a in enumerate(period) if any(p.op is Op.F and p.unit.first >= 0 for p in passes(a))]
    return any(a.op is Op.STEP for a in period[places[0] :]) if places else False


def _border(lowered: Lowered, rank: int) -> int:
    return first_forward(lowered.programs[rank].period)


def first_forward(period: Sequence[Instruction]) -> int:
    """Return the position in a period of the first forward of its own batch, which the border is before."""
    own = (i for i, (a, *_) in enumerate(period) if a.op is Op.F and a.unit.first >= 0 and a.unit.kind is Kind.TRAIN)
    return next(own, len(period))
