"""Add recomputation to a schedule: an R before each backward, in place of a graph kept since the forward.

Stages may recompute in *segments* (PipeMare, arXiv 1910.05124): only the first stage of a segment keeps its input, and
each of the others receives its input again from the recompute of the stage before. Gradients reach the last stage of a
segment first, so its input has to be recomputed first: a stage that n stages of its segment follow recomputes n
backwards ahead. In endless 1F1B these recomputes follow the forwards from stage to stage, and no rank waits for them
(in eager order, where twice as many microbatches are in flight, they start twice as early).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from penstock.checks import is_whole
from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.arrays import ArraySchedule
from penstock.schedule.ir.schedule import Action, Copy, Op, Program, Schedule, Stage, WeightRef, passes
from penstock.schedule.ir.version_rules import RULES, Source
from penstock.schedule.transforms.array_rule import recompute_in_arrays

Segments = int | Literal["auto"]
"""Stages per segment; "auto" is sqrt(stages), rounded."""

_BACKWARDS = (Op.B, Op.I)
"""The operations that can be the first backward of a unit."""


def with_recompute(schedule: Schedule, segments: Segments = 1, stages: Collection[int] | None = None) -> Schedule:
    """Add a recompute for each backward, on the weights that the version rule names.

    A stage whose backwards directly follow their forwards keeps no activations for long and is left unchanged. An R is
    placed directly before the backward of its microbatch, or before that of an earlier one where other stages of the
    segment wait for it; never before its own forward.

    Args:
        schedule: a schedule without recomputes.
        segments: number of stages per segment. The paper's choice is sqrt(stages), which keeps the least memory.
        stages: which of them recompute, by index; all if None.

    Raises:
        ConfigError: there are fewer stages than that.
        ScheduleError: backwards read derived copies, so that the weights of a recompute are undefined; or there are
            segments of several stages, and units are not whole microbatches.
    """
    length = length_of(segments, schedule.num_stages)
    if length == 1 and isinstance(schedule, ArraySchedule):
        found = recompute_in_arrays(schedule, stages)
        if found is not None:
            return found
    rule = RULES[schedule.rule]
    if Source.COPY in (rule.backward, rule.recompute):
        raise ScheduleError(
            f"{schedule.name}: rule {rule.name!r} needs an order that places its own recomputes; set recompute=none"
        )
    again = {action.stage.index for program in schedule.programs for action in _delayed(program)}
    groups = _groups(schedule, again if stages is None else again.intersection(stages), length)
    ahead = _leads(schedule, groups)
    units = {p.unit for p in schedule.passes() if p.op in _BACKWARDS}
    if any(ahead.values()) and any(unit.count > 1 or unit.slice for unit in units):
        raise ScheduleError(
            f"{schedule.name}: segments of several stages need backwards of one whole microbatch; set segments to 1"
        )
    programs = tuple(_inserted(schedule, program, ahead) for program in schedule.programs)
    return replace(schedule, programs=programs, segments=tuple(group for group in groups if len(group) > 1))


def length_of(segments: Segments, num_stages: int) -> int:
    """Return the number of stages per segment.

    Raises:
        ConfigError: it is not a number from 1 to the number of stages.
    """
    if segments == "auto":
        return max(round(math.sqrt(num_stages)), 1)
    if not is_whole(segments, 1) or segments > num_stages:
        raise ConfigError(
            f"segments must be the number of stages per segment, from 1 to {num_stages} here, or 'auto'; got "
            f"{segments!r}"
        )
    return segments


def _delayed(program: Program) -> Iterator[Action]:
    """Yield the backwards that do not directly follow their forward."""
    before = None
    for action in (*program.period, *program.epilogue):
        for p in passes(action):
            if p.op in _BACKWARDS and (before is None or before._replace(op=p.op) != p):
                yield p
        before = action


def _groups(schedule: Schedule, stages: set[int], length: int) -> list[tuple[int, ...]]:
    """Return runs of consecutive stages that recompute and get all their input from the one before, at most `length`
    each."""
    groups: list[tuple[int, ...]] = []
    for index in sorted(stages):
        last = groups[-1] if groups else ()
        if last and len(last) < length and [e.source for e in schedule.predecessors[index]] == [last[-1]]:
            groups[-1] = (*last, index)
        else:
            groups.append((index,))
    return groups


def _leads(schedule: Schedule, groups: list[tuple[int, ...]]) -> dict[Stage, int]:
    """Return the number of backwards by which each recomputing stage is ahead."""
    stages = [stage for group in groups for stage in schedule.stages if stage.index in group]
    last = {index: group[-1] for group in groups for index in group}
    held = {stage: _in_flight(schedule, stage) for stage in stages}
    found = {}
    for stage in stages:
        end = schedule.stage_at[last[stage.index], stage.direction]
        found[stage] = max(end.index - stage.index, held[stage] - held[end]) if end != stage else 0
    return found


def _in_flight(schedule: Schedule, stage: Stage) -> int:
    """Return the number of microbatches of a stage between forward and backward at a batch border."""
    backwards = (p for p in schedule.programs[stage.rank].passes() if p.op in _BACKWARDS)
    return sum(len(range(p.unit.first, 0, schedule.microbatches)) for p in backwards if p.stage == stage)


class _RecomputePlace(NamedTuple):
    """An R, by the number of its backward among those of its stage, and the action it is placed before."""

    number: int
    position: int
    action: Action


def _inserted(schedule: Schedule, program: Program, ahead: dict[Stage, int]) -> Program:
    """Add the recomputes of its stages to a program."""
    period: dict[int, list[Action]] = defaultdict(list)
    epilogue: dict[int, list[Action]] = defaultdict(list)
    for stage in sorted({p.stage for p in program.passes() if p.stage in ahead}):
        places = _places(program, stage, ahead[stage], schedule.microbatches)
        for part, found in zip((period, epilogue), places, strict=True):
            for place in sorted(found):
                part[place.position].append(place.action)
    newest = {a.stage: a.unit.first for a in program.period if a.op is Op.STEP}  # relative, at the start of a period

    def merge(actions: tuple[Action, ...], extra: dict[int, list[Action]]) -> Iterator[Action]:
        now = dict(newest)
        for position, action in enumerate(actions):
            for again in extra.get(position, ()):
                if RULES[schedule.rule].recompute is Source.NEWEST:
                    yield again._replace(reads=WeightRef((now[again.stage],)))
                else:
                    yield again
            if action.op is Op.STEP:
                now[action.stage] = action.unit.first + 1
            yield action

    return Program(tuple(merge(program.period, period)), tuple(merge(program.epilogue, epilogue)))


def _places(program: Program, stage: Stage, ahead: int, m: int) -> tuple[list[_RecomputePlace], list[_RecomputePlace]]:
    """Return the places of the recomputes of a stage, in the period and in the epilogue.

    Backwards are numbered through all periods: number j + t n is the j-th of the n in the t-th period from here.
    """
    periodic, final = (
        [(i, p) for i, a in enumerate(part) for p in passes(a) if p.op in _BACKWARDS and p.stage == stage]
        for part in program
    )
    forwards = {
        (p.unit.first % m, p.unit.slice): (p.unit.first // m, i)
        for i, a in enumerate(program.period)
        for p in passes(a)
        if p.op is Op.F and p.stage == stage
    }
    found: list[_RecomputePlace] = []
    leads: dict[tuple[object, ...], int] = {}  # number of backwards by which each microbatch of a batch is ahead
    left: set[tuple[object, ...]] = set()  # units that periods leave to the epilogue
    for j, (_, p) in enumerate(periodic):
        batch, k = divmod(p.unit.first, m)
        begun, after = forwards.get((k, p.unit.slice), (batch, -1))
        for lead in range(ahead, -1, -1):
            t, number = divmod(j - lead, len(periodic))
            if (batch - begun, after) < (t, periodic[number][0]):
                break
        leads[k, p.unit.slice] = lead
        again = _again(p, t, m)
        found.append(_RecomputePlace(j - t * len(periodic), periodic[number][0], again))
        left |= {(first, p.unit.slice) for first in range(again.unit.first, 0, m)}
    rest = [
        _RecomputePlace(j, final[max(j - leads[p.unit.first % m, p.unit.slice], 0)][0], _again(p, 0, m))
        for j, (_, p) in enumerate(final)
        if (p.unit.first, p.unit.slice) in left
    ]
    return found, rest


def _again(backward: Action, t: int, m: int) -> Action:
    """Return the recompute of a backward's unit, `t` periods after it, in the numbers of that period."""
    reads = backward.reads
    if reads is not None:
        derive = reads.derive and Copy(reads.derive.label, reads.derive.first - t * m)
        reads = WeightRef(tuple(version - t for version in reads.versions), derive)
    return Action(Op.R, backward.stage, backward.unit._replace(first=backward.unit.first - t * m), reads)
