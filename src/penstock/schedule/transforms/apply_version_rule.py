"""Write a version rule into an order: insert the updates, and annotate every pass with the version it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.errors import ScheduleError
from penstock.gc_pause import no_collection
from penstock.schedule.ir.arrays import ArrayOrder
from penstock.schedule.ir.limits import check_actions
from penstock.schedule.ir.op_table import PASSES
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.schedule import (
    Action,
    Copy,
    Op,
    Program,
    Schedule,
    Stage,
    Unit,
    WeightRef,
    format_action,
    passes,
)
from penstock.schedule.ir.version_rules import Placing, Source, VersionRule
from penstock.schedule.transforms.array_rule import apply_rule_to_arrays
from penstock.schedule.transforms.batch_ops import after_backwards, batch_unit, is_trained, with_reductions
from penstock.schedule.transforms.post_validation import with_validations
from penstock.schedule.transforms.predictions import with_predictions

BLEND = "i"
"""The label of the blended copies."""
Reads = Mapping[tuple[Stage, int], int]
"""The version, relative to its batch, that the forward of each (stage, microbatch of its batch) reads."""


@no_collection
def apply_rule(order: Order, rule: VersionRule, microbatches: int, name: str) -> Schedule:
    """Insert the updates that `rule` asks for and annotate every pass with the version it reads.

    A backward of several microbatches is split where it has to read different versions, as their forwards did.
    """
    if isinstance(order, ArrayOrder):
        in_arrays = apply_rule_to_arrays(order, rule, microbatches, name)
        if in_arrays is not None:
            return in_arrays
        check_actions(name, len(order.arrays), microbatches)
    with_steps = tuple(
        _insert_steps(program, [n for n in order.stages if n.rank == rank], rule, microbatches, name)
        for rank, program in enumerate(order.programs)
    )
    if rule.copies_forward:
        with_steps = tuple(with_predictions(program, rule, microbatches) for program in with_steps)
    forward_reads = _forward_offsets(with_steps, rule, microbatches)
    if rule.pins:
        with_steps = tuple(divided(program, forward_reads, microbatches) for program in with_steps)
    if rule.keeps_forward:
        with_steps = tuple(with_blends(program, forward_reads, microbatches) for program in with_steps)
    programs = tuple(_annotate(program, rule, forward_reads, microbatches) for program in with_steps)
    made = Schedule(
        name, microbatches, order.stages, order.edges, programs, rule.name, order.frozen, order.segments, order.window
    )
    return with_reductions(made, everywhere=False)


# --- positions of the updates ---------------------------------------------------------------------------------------


def _insert_steps(program: Program, stages: list[Stage], rule: VersionRule, m: int, name: str) -> Program:
    for stage in stages:
        if not is_trained(program, stage):
            continue  # forward-only: nothing to update
        period, epilogue = program
        *left, end = [Action(Op.STEP, stage, batch_unit(offset)) for offset in range(-rule.delay - 1, 1)]
        if rule.step is Placing.END:
            program = Program((*period, end), epilogue)
        elif rule.step is Placing.LATE:
            forwards = [i for i, a in enumerate(period) if any(p.op is Op.F and p.stage == stage for p in passes(a))]
            if not forwards:
                raise ScheduleError(f"{name}: stage {stage.name} on rank {stage.rank} has backwards but no forwards")
            first, (late, *between, last) = forwards[0], left
            drained = list(epilogue)
            for later in range(len(between), 0, -1):
                drained.insert(_drained_before(program, first + later * len(period), m), between[later - 1])
            program = Program((*period[:first], late, *period[first:]), (late, *drained, last))
        else:
            program = after_backwards(program, stage, Op.STEP, m)
    trained = [stage for stage in stages if is_trained(program, stage)]
    return with_validations(program, trained) if rule.provisional and trained else program


def _drained_before(program: Program, border: int, m: int) -> int:
    """Return how many actions of the epilogue would stand before a place, counted from batch T, if batches followed."""
    length, place = len(program.period), 0
    when = {_key(p, m): i - p.unit.first // m * length for i, p in _numbered(program.period)}
    for i, p in _numbered(program.epilogue):
        if when.get(_key(p, m), 0) + p.unit.first // m * length < border:
            place = i + 1
    return place


def _numbered(actions: tuple[Action, ...]) -> list[tuple[int, Action]]:
    """Return the passes, each with the position of its action."""
    return [(i, p) for i, action in enumerate(actions) for p in passes(action) if p.op in PASSES]


def _key(p: Action, m: int) -> tuple[object, ...]:
    """Return what a pass has in common with that of another batch."""
    return p.op, p.stage, p.unit.first % m, p.unit.slice


# --- versions read by passes ----------------------------------------------------------------------------------------


def _forward_offsets(programs: tuple[Program, ...], rule: VersionRule, m: int) -> dict[tuple[Stage, int], int]:
    """Map (stage, microbatch of its batch) to the version that its forward reads, relative to t."""
    reads: dict[tuple[Stage, int], int] = {}
    admission: dict[int, int] = {}
    first = min((a.stage.index for program in programs for a in program.period if a.op is Op.STEP), default=0)
    for program in programs:
        newest = _newest_before_period(program)
        for p in program.passes():
            if p.op is Op.STEP:
                newest[p.stage] = p.unit.first + 1
            elif p.op is Op.F:
                for batch, k in (divmod(number, m) for number in p.unit.microbatches):
                    here = -rule.delay if rule.forward is Source.BATCH else newest.get(p.stage, 0) - batch
                    reads[p.stage, k] = here
                    if p.stage.index == first:
                        admission[k] = here
    if rule.forward is Source.ADMISSION:
        missing = sorted({k for _, k in reads} - admission.keys())
        if missing:
            raise ScheduleError(f"stage {first} runs no forward of microbatches {missing}, which other stages run")
        return {(stage, k): admission[k] for stage, k in reads}
    return reads


def _newest_before_period(program: Program) -> dict[Stage, int]:
    """Return the newest version of each stage, relative to t, at the start of the period of batch t."""
    return {a.stage: a.unit.first for a in program.period if a.op is Op.STEP}


def _annotate(program: Program, rule: VersionRule, forward_reads: dict[tuple[Stage, int], int], m: int) -> Program:
    trained = {a.stage for a in program.period if a.op is Op.STEP}

    def annotate(action: Action, newest: dict[Stage, int]) -> Action:
        if action.parts:
            return action._replace(parts=tuple(annotate(p, newest) for p in action.parts))
        if action.op is Op.STEP:
            newest[action.stage] = action.unit.first + 1
        if action.op not in PASSES or action.reads is not None or action.stage not in trained:
            return action
        source = {Op.F: rule.forward, Op.R: rule.recompute}.get(action.op, rule.backward)
        if source is Source.NEWEST:
            return _reading(action, newest.get(action.stage, 0))
        batch, k = divmod(action.unit.first, m)
        if (action.stage, k) not in forward_reads:
            what = format_action(action, relative=True)
            raise ScheduleError(f"rank {action.stage.rank}, {what}: this rank runs no forward of microbatch {k}")
        return _reading(action, forward_reads[action.stage, k] + batch)

    def annotate_all(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        newest = _newest_before_period(program)
        return tuple(annotate(action, newest) for action in actions)

    return Program(annotate_all(program.period), annotate_all(program.epilogue))


def _reading(action: Action, version: int) -> Action:
    return Action(action.op, action.stage, action.unit, WeightRef((version,)))


# Insert PREDICTs that blend the version that a forward read with the newest one, for its backward.
#
# A backward of several microbatches has one blend, so it is split where their forwards read different versions.


def divided(program: Program, reads: Reads, microbatches: int) -> Program:
    """Split the backwards of a rank's program so that each belongs to forwards that read one version.

    Args:
        program: the program; only full backwards (B) are split.
        reads: the versions that forwards read.
        microbatches: m.
    """

    def divide(actions: tuple[Action, ...]) -> Iterator[Action]:
        for action in actions:
            if action.op is not Op.B or action.unit.count == 1:
                yield action
                continue
            for first, count in _runs(action, reads, microbatches):
                yield action._replace(unit=action.unit._replace(first=first, count=count))

    return Program(tuple(divide(program.period)), tuple(divide(program.epilogue)))


def _runs(action: Action, reads: Reads, m: int) -> list[tuple[int, int]]:
    """Split the unit of an action into (first microbatch, count) of consecutive microbatches whose forwards read one
    version."""
    runs: list[tuple[int, int]] = []
    before = None
    for number in action.unit.microbatches:
        version = reads.get((action.stage, number % m))
        if runs and version == before:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
        before = version
    return runs


def with_blends(program: Program, reads: Reads, microbatches: int) -> Program:
    """Add a PREDICT directly before each backward, which reads the blend that it makes.

    Args:
        program: a program with STEPs; each backward belongs to forwards that read one version.
        reads: the versions that forwards read.
        microbatches: m.

    Raises:
        ScheduleError: a backward is split into I and W, or fused with another pass.
    """
    trained = {action.stage: action.unit.first for action in program.period if action.op is Op.STEP}

    def place(actions: tuple[Action, ...]) -> Iterator[Action]:
        newest = dict(trained)
        for action in actions:
            if action.op is Op.STEP:
                newest[action.stage] = action.unit.first + 1
            if action.op in (Op.I, Op.W) or any(p.op is not Op.F for p in action.parts):
                raise ScheduleError(
                    f"{action}: a backward on a blend of two versions must be a full backward (B) and not fused"
                )
            if action.op is not Op.B or action.stage not in trained:
                yield action
                continue
            batch, k = divmod(action.unit.first, microbatches)
            blend = WeightRef((reads[action.stage, k] + batch, newest[action.stage]), Copy(BLEND, action.unit.first))
            yield Action(Op.PREDICT, action.stage, Unit(action.unit.first), blend)
            yield action._replace(reads=blend)

    return Program(tuple(place(program.period)), tuple(place(program.epilogue)))
