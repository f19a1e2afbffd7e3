"""Prove that every batch has every pass and update exactly once, for any number of batches.

The argument is static, over the text of the programs. In the period of batch t an action on relative microbatch `o`
works on microbatch o mod m of batch t + floor(o / m). So the periods cover every batch exactly once if and only if each
residue mod m appears once, with an offset below m. With an offset o < 0, T periods leave out the microbatches o, o + m,
o + 2m, ... below 0, relative to batch T: the epilogue must contain exactly these. Updates, which count batches, are the
case m = 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.ir.op_table import MOVES, PASSES, SWAPS
from penstock.schedule.ir.schedule import (
    Action,
    Kind,
    Op,
    Payload,
    Schedule,
    Stage,
    Unit,
    format_place,
    format_unit,
    split_fused,
)
from penstock.schedule.transforms.batch_ops import COLLECTIVES

_COUNTED = PASSES | {Op.STEP, Op.VALIDATE, Op.REDUCE, Op.TIE, Op.DECIDE, Op.AVERAGE, *SWAPS}


class _Slot(NamedTuple):
    """What must appear exactly once per batch, or microbatch: an operation on a stage, in any direction for passes."""

    place: str  # "stage 3" or "stage 3.1"
    op: Op
    slice: int
    every: int  # of a batch unit; 0 of microbatches


_Table = dict[_Slot, list[int]]
"""The offsets at which each slot appears, of all microbatches."""


def check_coverage(schedule: Schedule) -> None:
    """Prove that every batch gets all its passes and updates exactly once.

    Raises:
        ScheduleError: an action is missing, doubled, on the wrong rank, or belongs to a batch that has not begun.
    """
    _check_structure(schedule)
    periods, epilogues = (_offsets(schedule, part) for part in (0, 1))
    evaluation = any(p.unit.kind is Kind.EVAL for q in schedule.programs for part in q for p in split_fused(part))
    trained = {c for c in range(schedule.num_stages) if c not in schedule.frozen and not evaluation}
    for index in range(schedule.num_stages):
        _check_passes(schedule, index, index in trained, periods)
    _check_updates(schedule, trained, periods)
    _check_epilogues(schedule, periods, epilogues)
    _check_moves(schedule)
    _check_averages(schedule, trained, periods, epilogues)


def _offsets(schedule: Schedule, part: int) -> _Table:
    """Return where everything appears in the periods (part 0) or the epilogues (part 1)."""
    found: dict[tuple[Stage | int, Op, int, int], list[int]] = defaultdict(list)  # names are formatted once each
    for program in schedule.programs:
        for op, stage, (first, count, piece, kind, every), *_ in split_fused(program[part]):
            if op not in _COUNTED:
                continue
            if kind is Kind.BATCH:
                found[stage, op, 0, every].append(first)
            elif count == 1:
                found[stage.index, op, piece[0] if piece else 0, 0].append(first)
            else:
                found[stage.index, op, piece[0] if piece else 0, 0] += range(first, first + count)
    table: _Table = defaultdict(list)
    for (place, op, slice_, every), offsets in found.items():
        table[_Slot(f"stage {place.name if isinstance(place, Stage) else place}", op, slice_, every)] += offsets
    return table


def _check_structure(schedule: Schedule) -> None:
    name, stages = schedule.name, frozenset(schedule.stages)
    if schedule.microbatches < 1:
        raise ScheduleError(f"{name}: a batch needs at least 1 microbatch, got {schedule.microbatches}")
    doubled = [key for key, n in Counter((n.index, n.direction) for n in schedule.stages).items() if n > 1]
    held = {n.index for n in stages}
    missing = [c for c in range(schedule.num_stages) if c not in held]
    if doubled or missing:
        raise ScheduleError(f"{name}: stages on no rank: {missing}; (stage, direction) held twice: {doubled}")
    for edge in schedule.edges:
        if edge.source not in held or edge.target not in held or edge.source == edge.target:
            raise ScheduleError(f"{name}: edge {edge.source}>{edge.target} does not connect two stages")
    twice = [pair for pair, n in Counter((e.source, e.target) for e in schedule.edges).items() if n > 1]
    if twice:
        raise ScheduleError(
            f"{name}: more than one edge from stage {twice[0][0]} to stage {twice[0][1]}; merge them into one"
        )
    _check_segments(schedule, held)
    fine: set[tuple[object, ...]] = set()  # kinds of actions
    for rank, program in enumerate(schedule.programs):
        own = {stage for stage in stages if stage.rank == rank}
        for actions, begun in ((program.period, 1), (program.epilogue, 0)):
            for action in actions:
                if action.parts and any(p.op not in PASSES for p in action.parts):
                    raise ScheduleError(f"{name}: {format_place(schedule, action)} fuses something other than passes")
                for p in action.parts or (action,):
                    if p.stage not in own:
                        raise ScheduleError(f"{name}: {p} is in the program of rank {rank}, which holds no such stage")
                    _check_unit(schedule, p, begun, fine)


def _check_segments(schedule: Schedule, held: set[int]) -> None:
    """Check that a segment is a chain: each stage gets all its input from the one before."""
    name, recomputed = schedule.name, schedule.recomputed
    unknown = sorted({*schedule.frozen, *(c for s in schedule.segments for c in s)} - held)
    if unknown:
        raise ScheduleError(f"{name}: there is no stage {unknown[0]} to be frozen or in a segment")
    twice = [index for index, n in Counter(c for s in schedule.segments for c in s).items() if n > 1]
    if twice:
        raise ScheduleError(f"{name}: stage {twice[0]} appears twice in segments")
    for segment in schedule.segments:
        without = [index for index in segment if index not in recomputed]
        if without:
            raise ScheduleError(f"{name}: stage {without[0]} is in a segment, but does not recompute")
        for before, index in pairwise(segment):
            if [edge.source for edge in schedule.predecessors[index]] != [before]:
                raise ScheduleError(f"{name}: in a segment stage {before} must be the only input of stage {index}")


def _check_unit(schedule: Schedule, action: Action, begun: int, fine: set[tuple[object, ...]]) -> None:
    """Check that a unit is one of its operation, and lies within one batch that has begun.

    Args:
        schedule, action: which.
        begun: the batch, relative to the action's own, before which it must lie.
        fine: kinds of actions that are known to be right; extended.
    """
    first, count, piece, kind, every = action.unit
    fault = None
    shape = action.op, count, piece, kind, every, action.peer is None
    if shape not in fine:  # large schedules have hundreds of thousands of actions, of few kinds
        fault = _kind_fault(schedule, action)
        fine.add(shape)
    size = 1 if kind is Kind.BATCH else schedule.microbatches
    if fault is None and count > 1 and first // size != (first + count - 1) // size:
        fault = " crosses the border of a batch"
    if fault is None and first + count > begun * size:
        last = schedule.microbatches - 1
        numbers = f"; microbatches of a batch are numbered from 0 to {last}" if action.op in PASSES else ""
        fault = f" belongs to a batch that has not begun{numbers}"
    if fault is not None:
        raise ScheduleError(f"{schedule.name}: {format_place(schedule, action)}{fault}")


def _kind_fault(schedule: Schedule, action: Action) -> str | None:
    """Return what is wrong with an action, whatever the number of its unit, to be said after its place."""
    op, unit = action.op, action.unit
    if op in (Op.SEND, Op.RECV, Op.REDO, Op.FUSED):
        return f": {op} must not be written in a schedule; lowering adds it"
    if (unit.kind is Kind.BATCH) is (op in PASSES or op in MOVES or op is Op.PREDICT):
        return f": {op} works on {'microbatches' if unit.kind is Kind.BATCH else 'batches'}"
    if unit.every != 1 and (op is not Op.AVERAGE or unit.every < 1):
        return f": only an AVERAGE may skip batches; every batch needs its {op}"
    if (op in (Op.HOLD, Op.RETURN) and action.peer is None) or (action.peer is not None and op not in MOVES):
        return ": HOLD and RETURN must name the peer, as in HOLD2@3<0/parked; OFFLOAD and FETCH may"
    pieces = unit.slice[1] if unit.slice else 1
    if unit.count < 1 or (op is not Op.PREDICT and unit.kind is not Kind.BATCH and pieces != schedule.slices):
        return ": a unit must hold at least one microbatch, and all units must have the same number of slices"
    return None


def _check_passes(schedule: Schedule, index: int, trained: bool, periods: _Table) -> None:
    place, m, pieces = f"stage {index}", schedule.microbatches, range(schedule.slices)
    operations = Op.F, Op.B, Op.I, Op.W, Op.R
    found = [[_residues(periods.get(_Slot(place, op, piece, 0), ()), m) for op in operations] for piece in pieces]
    usual = [1, *([1, 0, 0] if trained else [0, 0, 0]), int(index in schedule.recomputed)]
    for k in range(m):
        for piece in pieces:
            counts = [each[k] for each in found[piece]]
            if counts == usual:
                continue
            forwards, *backwards, recomputes = counts
            where = f"{schedule.name}: microbatch {k}{f', slice {piece}' if schedule.slices > 1 else ''}, {place}"
            if forwards != 1:
                raise ScheduleError(f"{where} has {forwards} forwards per batch instead of 1")
            if not trained and any(backwards):
                raise ScheduleError(f"{where} is frozen or only evaluated and must have no backward")
            if trained and backwards not in ([1, 0, 0], [0, 1, 1]):
                b, i, w = backwards
                raise ScheduleError(f"{where} needs one B, or one I and one W, per batch; it has {b} B, {i} I, {w} W")
            if recomputes != (index in schedule.recomputed):
                raise ScheduleError(f"{where} has {recomputes} recomputes per batch; all or none need one")


def _residues(offsets: Iterable[int], m: int) -> list[int]:
    """Count the offsets of each microbatch of a batch."""
    counts = [0] * m
    for offset in offsets:
        counts[offset % m] += 1
    return counts


def _check_updates(schedule: Schedule, trained: set[int], periods: _Table) -> None:
    held = Counter(n.index for n in schedule.stages)
    decided = any(slot.op is Op.DECIDE for slot in periods)
    for stage in schedule.stages:
        steps, reduces, ties, decides = (
            len(periods.get(_Slot(f"stage {stage.name}", op, 0, 1), ())) for op in (Op.STEP, *COLLECTIVES)
        )
        where = f"{schedule.name}: stage {stage.name} on rank {stage.rank}"
        if steps != (stage.index in trained):
            raise ScheduleError(f"{where} has {steps} STEPs per batch instead of {int(stage.index in trained)}")
        several = held[stage.index] > 1
        parts = schedule.sharding.level.splits_gradients and not several  # a gradient may be added up in parts
        if (reduces > 1 and not parts) or (several and steps and not reduces):
            raise ScheduleError(
                f"{where} has {reduces} REDUCEs per batch; a stage of several directions needs one before each STEP"
            )
        if ties > steps:
            raise ScheduleError(f"{where} has {ties} TIEs per batch; a stage that is trained may have one")
        swaps = [len(periods.get(_Slot(f"stage {stage.name}", op, 0, 1), ())) for op in (Op.SWAPIN, Op.SWAPOUT)]
        if swaps not in ([0, 0], [steps, steps]):
            raise ScheduleError(
                f"{where} has {swaps[0]} SWAPINs and {swaps[1]} SWAPOUTs per batch; a stage that is trained may have "
                "one of each, around its STEP"
            )
        if decides != (decided and steps):
            raise ScheduleError(
                f"{where} has {decides} DECIDEs per batch; either all stages that are trained have one, or none"
            )


def _check_moves(schedule: Schedule) -> None:
    """Check that activations moved to another rank are received and returned there exactly once."""
    named = [a for program in schedule.programs for part in program for a in part if a.peer is not None]
    for giving, taking in ((Op.OFFLOAD, Op.HOLD), (Op.RETURN, Op.FETCH)):
        moves: dict[Op, list[tuple[Stage, Stage, Unit]]] = {giving: [], taking: []}
        for a in named:
            if a.op in moves and a.peer is not None:
                moves[a.op].append((a.stage, a.peer, a.unit) if a.op is giving else (a.peer, a.stage, a.unit))
                if a.peer.rank == a.stage.rank:
                    raise ScheduleError(
                        f"{schedule.name}: {a} moves activations to a stage of the same rank, which frees nothing; "
                        "move them to a stage of another rank, or to the host (without a peer)"
                    )
                if a.payload is not Payload.PARKED:
                    raise ScheduleError(
                        f"{schedule.name}: {a} moves activations, so its payload must be /{Payload.PARKED}"
                    )
        given, taken = Counter(moves[giving]), Counter(moves[taking])
        for (source, target, unit), n in (given | taken).items():
            if n > 1 or given[source, target, unit] != taken[source, target, unit]:
                what = f"the activations of {format_unit(unit)} from stage {source.name} to stage {target.name}"
                raise ScheduleError(
                    f"{schedule.name}: {giving} and {taking} move {what} {given[source, target, unit]} and "
                    f"{taken[source, target, unit]} times; each must appear exactly once"
                )


def _check_epilogues(schedule: Schedule, periods: _Table, epilogues: _Table) -> None:
    for slot in sorted(periods.keys() | epilogues.keys()):
        if slot.op is Op.AVERAGE:
            continue
        step = 1 if slot.op not in PASSES else schedule.microbatches
        wanted = sorted([o for offset in periods.get(slot, ()) if offset < 0 for o in range(offset, 0, step)])
        found = sorted(epilogues.get(slot, ()))
        if found != wanted:
            differing = Counter(found)
            differing.subtract(wanted)
            residue = min(o % step for o, n in differing.items() if n)  # of one microbatch, to be brief
            wanted, found = ([o for o in each if o % step == residue] for each in (wanted, found))
            piece = f", slice {slot.slice}" if schedule.slices > 1 else ""
            raise ScheduleError(
                f"{schedule.name}: to drain, {slot.place}{piece} must run {slot.op} for {wanted or 'nothing'} "
                f"(relative to the end); the epilogue has {found or 'nothing'}"
            )


def _check_averages(schedule: Schedule, trained: set[int], periods: _Table, epilogues: _Table) -> None:
    """Check that every trained stage averages after the same batches, or its copies would diverge."""
    averaged: dict[str, list[tuple[int, int]]] = {f"stage {n.name}": [] for n in schedule.stages if n.index in trained}
    for slot in sorted(s for s in periods.keys() | epilogues.keys() if s.op is Op.AVERAGE):
        starts, rest = periods.get(slot, []), sorted(epilogues.get(slot, []))
        # The periods cover the batches up to the offset from the end of the span, the epilogue those after it.
        if len(starts) != 1 or rest != list(range(starts[0], starts[0] + len(rest))):
            raise ScheduleError(
                f"{schedule.name}: {slot.place} must AVERAGE once per period, and continue without gaps in the "
                f"epilogue; it has {starts}, then {rest}"
            )
        averaged.setdefault(slot.place, []).append((slot.every, starts[0] + len(rest) - 1))
    common = next(iter(averaged.values()), [])
    for place, found in averaged.items():
        if found != common:
            text = [", ".join(f"every {n}, up to T{end:+d}" for n, end in kind) or "none" for kind in (common, found)]
            raise ScheduleError(
                f"{schedule.name}: every stage must AVERAGE after the same batches; {next(iter(averaged))} has "
                f"{text[0]}, {place} has {text[1]}"
            )
