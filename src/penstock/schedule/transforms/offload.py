"""Add copies of activations to the host's memory: an OFFLOAD behind a forward, and a FETCH some passes before its
backward, so that both copies are made beside passes.

A rank then has the activations of about three microbatches of a stage at a time, however many are in flight: those
that a forward makes, those that a backward uses, and those that are on their way back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, Stage, passes

_USING = (Op.B, Op.I)
_AHEAD = 1  # passes between a FETCH and the backward, beside which the copy is made
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
