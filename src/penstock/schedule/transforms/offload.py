"""Add copies to the host's memory and back, which are made beside passes.

Of activations: an OFFLOAD behind a forward, and a FETCH a pass before its backward. A rank then has the activations of
about three microbatches of a stage at a time, however many are in flight: those that a forward makes, those that a
backward uses, and those that are on their way back.

Of optimizer states: a SWAPIN a pass before a STEP, and a SWAPOUT behind it. Where STEPs of several stages follow one
another, the state of a stage comes during the update of the one before. So the states of at most two stages of a rank
are on its device at a time, and a third one on its way back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.op_table import PASSES
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, Stage, passes
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.transforms.batch_ops import batch_unit

_USING = (Op.B, Op.I)
_AHEAD = 1  # passes between a FETCH and the backward, or a SWAPIN and the STEP, beside which the copy is made
_TOGETHER = 2  # optimizer states that are here at a time
_LEAST = 2 + _AHEAD  # passes from a forward to its backward from which on there is something to gain

_Unit = tuple[Stage, int, tuple[int, int] | None]
"""Stage, microbatch of a batch, and slice."""


def with_offload(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """Move the activations of all microbatches away whose backward comes late enough.

    Stages that recompute keep their input only, and nothing of theirs is moved.

    Args:
        schedule: a schedule that moves nothing.
        stages: which of them, by index; all that recompute nothing if None.

    Raises:
        ConfigError: some of them recompute.
        ScheduleError: the schedule moves activations by itself.
    """
    if Op.OFFLOAD in schedule.operations:
        raise ScheduleError(f"{schedule.name}: the schedule moves activations by itself; leave offload out")
    both = sorted(schedule.recomputed.intersection(stages or ()))
    if both:
        raise ConfigError(f"{schedule.name}: stage {both[0]} recomputes, and so keeps no activations to offload")
    wanted = set(range(schedule.num_stages) if stages is None else stages) - schedule.recomputed
    programs = tuple(_moved(program, schedule.microbatches, wanted) for program in schedule.programs)
    return replace(schedule, programs=programs)


def _moved(program: Program, m: int, stages: set[int]) -> Program:
    """Add the copies of one rank to its program."""
    late = _late(program, m, stages)
    before: tuple[dict[int, list[Action]], ...] = (defaultdict(list), defaultdict(list))
    for found, actions in zip(before, program, strict=True):
        works = [i for i, action in enumerate(actions) if any(True for _ in _units(action, m, (Op.F, *_USING)))]
        for place, position in enumerate(works):
            for unit, first in _units(actions[position], m, _USING):
                if unit in late:
                    found[works[max(place - _AHEAD, 0)]].append(_copy(actions[position], Op.FETCH, unit, first))
    period = _fetched_behind(program.period, before[0])

    def merged(actions: tuple[Action, ...], fetches: dict[int, list[Action]]) -> Iterator[Action]:
        for position, action in enumerate(actions):
            yield from fetches.get(position, ())
            yield action
            for unit, first in _units(action, m, (Op.F,)):
                if unit in late:
                    yield _copy(action, Op.OFFLOAD, unit, first)

    return Program(tuple(merged(program.period, period)), tuple(merged(program.epilogue, before[1])))


def _fetched_behind(actions: tuple[Action, ...], fetches: dict[int, list[Action]]) -> dict[int, list[Action]]:
    """Return where FETCHs stand, none of which may come before its own OFFLOAD in the same period."""
    made = {(p.stage, p.unit.first, p.unit.slice): i for i, a in enumerate(actions) for p in passes(a) if p.op is Op.F}
    found: dict[int, list[Action]] = defaultdict(list)
    for position, group in fetches.items():
        for fetch in group:
            own = made.get((fetch.stage, fetch.unit.first, fetch.unit.slice), -1)
            found[max(position, own + 1)].append(fetch)
    return found


def _late(program: Program, m: int, stages: set[int]) -> set[_Unit]:
    """Return the units with so many passes between forward and backward that it pays to move them away."""
    works = [list(_units(action, m, (Op.F, *_USING))) for action in program.period]
    order = [found for found in works if found]
    begun: dict[_Unit, int] = {}  # place of the forward, counted from that in the period of batch 0
    found = set[_Unit]()
    for op in ((Op.F,), _USING):
        place = 0
        for action in program.period:
            if not any(True for _ in _units(action, m, (Op.F, *_USING))):
                continue
            for unit, first in _units(action, m, op):
                here = place - first // m * len(order)  # of batch 0
                if op == (Op.F,):
                    begun[unit] = here
                elif unit in begun and here - begun[unit] >= _LEAST and unit[0].index in stages:
                    found.add(unit)
            place += 1
    return found


def _units(action: Action, m: int, ops: Collection[Op]) -> Iterator[tuple[_Unit, int]]:
    """Yield the units that an action handles, with the relative number of their microbatch."""
    for p in passes(action):
        if p.op in ops:
            for number in p.unit.microbatches:
                yield (p.stage, number % m, p.unit.slice), number


def _copy(action: Action, op: Op, unit: _Unit, first: int) -> Action:
    like = next(p for p in passes(action) if p.stage == unit[0])
    return Action(op, unit[0], like.unit._replace(first=first, count=1, slice=unit[2]))


# --- optimizer states -------------------------------------------------------------------------------------------------


def with_swaps(schedule: Schedule) -> Schedule:
    """Keep the optimizer states of all stages in the memory of the host between their updates.

    Raises:
        ScheduleError: updates may be taken back, which needs the state when it has gone.
    """
    if RULES[schedule.rule].provisional:
        raise ScheduleError(
            f"{schedule.name}: an update that may be taken back needs the optimizer state until it is decided on; set "
            "offload_optimizer to none"
        )
    return replace(schedule, programs=tuple(map(_swapped, schedule.programs)))


def _swapped(program: Program) -> Program:
    """Add the copies of one rank to its program."""
    period, early = _swaps_before(program.period)
    epilogue, _ = _swaps_before(program.epilogue, {stage: batch - 1 for stage, batch in early.items()})
    last = _carried_to(program.period)
    period[last] += [_swap(Op.SWAPIN, stage, batch) for stage, batch in early.items()]
    return Program(tuple(_with_swapouts(program.period, period)), tuple(_with_swapouts(program.epilogue, epilogue)))


def _swaps_before(
    actions: tuple[Action, ...], here: Mapping[Stage, int] | None = None
) -> tuple[dict[int, list[Action]], dict[Stage, int]]:
    """Return which SWAPINs stand before which actions of a part of a program.

    Args:
        actions: the part.
        here: of an epilogue, the batches whose states have come in the period before, by stage.

    Returns:
        Them by position; and those for whose STEP no pass stands before it, which come at the end of the period before:
        their batches by stage, relative to that.
    """
    works = [i for i, action in enumerate(actions) if passes(action)[0].op in PASSES]
    steps = [i for i, action in enumerate(actions) if action.op is Op.STEP]
    found: dict[int, list[Action]] = defaultdict(list)
    early: dict[Stage, int] = {}
    for number, position in enumerate(steps):
        stage, batch = actions[position].stage, actions[position].unit.first
        if here is not None and here.get(stage) == batch:
            continue
        before = [i for i in works if i < position]
        free = [steps[number - _TOGETHER]] if number >= _TOGETHER else []
        free += [i for i in steps[:number] if actions[i].stage == stage]
        if here is None and not before and not free:
            early[stage] = batch + 1
            continue
        place = before[-_AHEAD] if len(before) >= _AHEAD else min(position, steps[0])
        found[max([place, *(i + 1 for i in free)])].append(_swap(Op.SWAPIN, stage, batch))
    return found, early


def _carried_to(period: tuple[Action, ...]) -> int:
    """Return where the SWAPINs for the beginning of the next period stand: before the last pass, behind all STEPs."""
    works = [i for i, action in enumerate(period) if passes(action)[0].op in PASSES]
    steps = [i for i, action in enumerate(period) if action.op is Op.STEP]
    return max([*works[-_AHEAD:][:1], *(i + 1 for i in steps)], default=0)


def _with_swapouts(actions: tuple[Action, ...], before: Mapping[int, list[Action]]) -> Iterator[Action]:
    for position, action in enumerate(actions):
        yield from before.get(position, ())
        yield action
        if action.op is Op.STEP:
            yield _swap(Op.SWAPOUT, action.stage, action.unit.first)
    yield from before.get(len(actions), ())


def _swap(op: Op, stage: Stage, batch: int) -> Action:
    return Action(op, stage, batch_unit(batch))
