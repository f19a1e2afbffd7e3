"""What of its stages each rank of a sharded schedule has whole at once, and how often it gathers and reduces.

Both follow from the order of a rank's own actions, so no times are needed. A GATHER takes a place when it is issued,
and its RELEASE gives it back. A full-size gradient takes one from the first backward that adds to it to the end of its
REDUCE; as a REDUCE goes on while passes run, that end is certain only at the STEP that waits for it, unless the
schedule limits the places, so that the next gradient waits for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Action, Op, Schedule, Stage, passes
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Update
from penstock.schedule.machine.gradient_room import ADDING

_SETTLED = 4  # batches after which everything has repeated
_CHANGING = frozenset({*ADDING, Op.REDUCE, Op.STEP, Op.GATHER, Op.RELEASE})  # what is whole


class RankShards(NamedTuple):
    """What a rank gathers and reduces for each batch, and has whole at once.

    Attributes:
        gathers, reductions: for each batch, in the steady state.
        gathered: the most stages that are gathered at once; 0 where weights stay whole.
        gradients: the most full-size gradients at once.
        gathered_share, gradients_share: the same in units of the rank's whole share, of which one of v stages is 1/v.
        waiting_share: the most shards of sums that wait for their STEP, in the same units; 0 where sums wait in the
            full-size gradients, because there is room for all.
    """

    gathers: int
    reductions: int
    gathered: int
    gradients: int
    gathered_share: Fraction
    gradients_share: Fraction
    waiting_share: Fraction


def shard_facts(schedule: Schedule, batches: int) -> tuple[RankShards, ...]:
    """Derive what each rank has whole at once, in a span of any length.

    Args:
        schedule: sharded.
        batches: the length of a span in which everything has repeated.

    Raises:
        ScheduleError: a rank has more whole than the schedule allows.
    """
    return tuple(_of_rank(schedule, rank, batches) for rank in range(schedule.ranks))


def _of_rank(schedule: Schedule, rank: int, batches: int) -> RankShards:
    stages = schedule.on_rank(rank)
    unit = lcm(*(schedule.chunks[stage] for stage in stages))  # of the rank's whole share, so that shares are whole
    share = {stage: unit // schedule.chunks[stage] for stage in stages}
    period, sharding = schedule.programs[rank].period, schedule.sharding
    counts = _most_whole(schedule, rank, batches, dict.fromkeys(stages, 1))
    shares = _most_whole(schedule, rank, batches, share)
    for what, found, limit in (
        ("stages are gathered", counts.gathered, sharding.weights),
        ("full-size gradients accumulate", counts.adding, sharding.gradients),
    ):
        if limit is not None and found > limit:
            raise ScheduleError(
                f"{schedule.name}: on rank {rank} {found} {what} at once, but the schedule allows {limit} "
                f"({sharding}); free one before the next begins, or allow more"
            )
    gradients, largest = counts.gradients, max(share.values(), default=0)
    waiting, held = 0, shares.gradients
    if sharding.gradients is not None and gradients > sharding.gradients:
        gradients, held = sharding.gradients, min(held, sharding.gradients * largest)
        waiting = shares.waiting
    return RankShards(
        sum(a.op is Op.GATHER for a in period),
        sum(a.op is Op.REDUCE for a in period),
        counts.gathered,
        gradients,
        *(Fraction(each, unit) for each in (shares.gathered, held, waiting)),
    )


def sums_wait(schedule: Schedule, rank: int, low_precision: bool = False) -> bool:
    """Return whether shards of sums wait for their STEP on a rank, as full-size gradients have fewer places.

    Where there is room for all of them, and where updates are written over whole gradients, sums stay in the gradients.

    Args:
        schedule: sharded.
        rank: which.
        low_precision: weights that are updated are not those that passes read, so no update is written over a gradient.
    """
    limit = schedule.sharding.gradients
    rotates = RULES[schedule.rule].update is Update.ROTATE and schedule.sharding.level is not Level.FULL
    if limit is None or (rotates and not low_precision):
        return False
    return _most_whole(schedule, rank, _SETTLED, dict.fromkeys(schedule.on_rank(rank), 1)).gradients > limit


class _Most(NamedTuple):
    gathered: int
    adding: int  # gradients between their first backward and their REDUCE
    gradients: int  # between their first backward and their STEP
    waiting: int  # shards between their first REDUCE and their STEP


def _most_whole(schedule: Schedule, rank: int, batches: int, sizes: Mapping[Stage, int]) -> _Most:
    """Return the most of everything in the order of a rank's actions, each stage counting by its size."""
    gathered: set[object] = set()
    adding, gradients, waiting = (dict[tuple[Stage, int], int]() for _ in range(3))
    most = [0] * 4
    weights = schedule.sharding.level is Level.FULL
    now = 0
    for action in actions_of(schedule, rank, batches, ops=_CHANGING):
        for p in passes(action):
            now += _gathered(p, gathered, sizes) if weights else 0
            batch = p.unit.first // schedule.microbatches if p.op in ADDING else p.unit.first
            key = p.stage, batch
            if p.op in ADDING:
                if key in adding and key in gradients:
                    continue
                adding[key] = gradients[key] = sizes[p.stage]
            elif p.op is Op.REDUCE:
                adding.pop(key, None)
                waiting[key] = sizes[p.stage]
            elif p.op is Op.STEP:
                gradients.pop(key, None)
                waiting.pop(key, None)
        whole = now, *(sum(each.values()) for each in (adding, gradients, waiting))
        most = [*map(max, most, whole)]
    return _Most(*most)


def _gathered(action: Action, gathered: set[object], sizes: Mapping[Stage, int]) -> int:
    """Return by how much an action changes what is gathered."""
    key = action.stage, action.reads
    if action.op is Op.GATHER and key not in gathered:
        gathered.add(key)
        return sizes[action.stage]
    if action.op is Op.RELEASE and key in gathered:
        gathered.remove(key)
        return -sizes[action.stage]
    return 0
