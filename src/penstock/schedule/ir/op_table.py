"""The registry of operations: the lane, dependencies, results and activation memory of each.

Dependencies are expressed in *facts*. A fact says that something exists at a stage for one microbatch (and slice): its
forward output ("F"), the same again after a rejected version ("A"), the gradient of its input ("G"), its recomputed
activations ("R"), its activations moved to another rank ("P"), or moved back from there ("U"). Lowering, the proof and
the simulator read the dependencies of an operation here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from penstock.schedule.ir.schedule import Action, Kind, Op, Payload, Schedule


class Lane(StrEnum):
    """The kind of lane on which an operation takes time."""

    COMPUTE = "compute"
    TRANSFER = "transfer"  # one lane per (peer, direction, payload)
    COLLECTIVE = "collective"  # one lane per (group, operation)
    COPY = "copy"  # device to host and back


class Fact(NamedTuple):
    """States that `what` exists at (stage, direction) for a microbatch and slice."""

    what: str
    stage: int
    direction: int
    microbatch: int
    slice: int = 0


PAYLOAD_OF_FACT: Mapping[str, Payload] = MappingProxyType(
    {"F": Payload.ACTIVATION, "A": Payload.REPAIR, "G": Payload.GRADIENT, "R": Payload.RECOMPUTE}
    | dict.fromkeys("PU", Payload.PARKED)
)


@dataclass(frozen=True)
class OpSpec:
    """The lane, dependencies and activation memory of one operation.

    Attributes:
        lane: the lane it occupies.
        gives: the facts that hold once it is done.
        needs: the facts that must hold before it starts.
        memory: activation memory (allocated at its start, freed at its end), as a function of the action, the schedule,
            the activations of the action's unit, and the part of them that is kept from I to W.
    """

    lane: Lane
    gives: Callable[[Action], Iterator[Fact]]
    needs: Callable[[Action, Schedule], Iterator[Fact]]
    memory: Callable[[Action, Schedule, int, int], tuple[int, int]]


def _facts(what: str, action: Action) -> Iterator[Fact]:
    index, direction, _ = action.stage
    piece = action.unit.slice[0] if action.unit.slice else 0
    for microbatch in action.unit.microbatches:
        yield Fact(what, index, direction, microbatch, piece)


def _forward_needs(action: Action, schedule: Schedule) -> Iterator[Fact]:
    for fact in _facts("F", action):
        for edge in schedule.predecessors[fact.stage]:
            yield fact._replace(stage=edge.source)
        if fact.slice:  # sequence slices: keys and values of the slice before
            yield fact._replace(slice=fact.slice - 1)


def _redo_needs(action: Action, schedule: Schedule) -> Iterator[Fact]:
    """Return the outputs that preceding stages recomputed after a rejection; the rest of the input is unchanged."""
    for fact in _facts("A", action):
        for edge in schedule.predecessors[fact.stage]:
            yield fact._replace(stage=edge.source)


def _backward_needs(action: Action, schedule: Schedule) -> Iterator[Fact]:
    yield from _facts("F", action)
    if recomputes(schedule, action):
        yield from _facts("R", action)
    for fact in _facts("G", action):
        for edge in schedule.successors[fact.stage]:
            if edge.backward:
                yield fact._replace(stage=edge.target)
        if action.unit.slice and fact.slice + 1 < action.unit.slice[1]:
            yield fact._replace(slice=fact.slice + 1)


def _recompute_needs(action: Action, schedule: Schedule) -> Iterator[Fact]:
    yield from _facts("F", action)
    before = schedule.segment_before(action.stage.index)
    if before is not None:
        for fact in _facts("R", action):
            yield fact._replace(stage=before)


def recomputes(schedule: Schedule, action: Action) -> bool:
    """Return whether the backward of this action's unit waits for a recompute."""
    return action.unit.kind is Kind.TRAIN and action.stage.index in schedule.recomputed


def _forward_memory(action: Action, schedule: Schedule, whole: int, _held: int) -> tuple[int, int]:
    if action.unit.kind is Kind.EVAL or action.stage.index in schedule.frozen:
        return (whole, -whole)
    return (0, 0) if recomputes(schedule, action) else (whole, 0)


def _parked(what: str, action: Action) -> Iterator[Fact]:
    """Return the facts of moved activations, of this stage or of its peer; none where only the host takes part."""
    if action.peer is not None:
        owner = action.peer if action.op in (Op.HOLD, Op.RETURN) else action.stage
        yield from _facts(what, action._replace(stage=owner))


def _hold_memory(action: Action, schedule: Schedule, whole: int, _held: int) -> tuple[int, int]:
    """Nothing is held for microbatches that the owner recomputes."""
    taken = 0 if action.peer is None or action.peer.index in schedule.recomputed else whole
    return (taken, 0) if action.op is Op.HOLD else (0, -taken)


def _offload_memory(action: Action, schedule: Schedule, whole: int, _held: int) -> tuple[int, int]:
    """Only the input is moved of a microbatch that will be recomputed."""
    return (0, 0) if recomputes(schedule, action) else (0, -whole)


def _fetch_memory(action: Action, schedule: Schedule, whole: int, _held: int) -> tuple[int, int]:
    return (0, 0) if recomputes(schedule, action) else (whole, 0)


def _none(_action: Action, _schedule: Schedule | None = None) -> Iterator[Fact]:
    return iter(())


def _plain(lane: Lane) -> OpSpec:
    return OpSpec(lane, _none, _none, lambda _a, _s, _w, _h: (0, 0))


OPS: Mapping[Op, OpSpec] = MappingProxyType(
    {
        Op.F: OpSpec(Lane.COMPUTE, lambda a: _facts("F", a), _forward_needs, _forward_memory),
        Op.B: OpSpec(Lane.COMPUTE, lambda a: _facts("G", a), _backward_needs, lambda _a, _s, w, _h: (0, -w)),
        Op.I: OpSpec(Lane.COMPUTE, lambda a: _facts("G", a), _backward_needs, lambda _a, _s, w, h: (0, h - w)),
        Op.W: OpSpec(Lane.COMPUTE, _none, lambda a, _s: _facts("G", a), lambda _a, _s, _w, h: (0, -h)),
        Op.R: OpSpec(Lane.COMPUTE, lambda a: _facts("R", a), _recompute_needs, lambda _a, _s, w, _h: (w, 0)),
        Op.REDO: OpSpec(Lane.COMPUTE, lambda a: _facts("A", a), _redo_needs, lambda _a, _s, _w, _h: (0, 0)),
        Op.STEP: _plain(Lane.COMPUTE),
        Op.PREDICT: _plain(Lane.COMPUTE),
        Op.VALIDATE: _plain(Lane.COMPUTE),
        Op.REDUCE: _plain(Lane.COLLECTIVE),
        Op.TIE: _plain(Lane.COLLECTIVE),
        Op.DECIDE: _plain(Lane.COLLECTIVE),
        Op.AVERAGE: _plain(Lane.COLLECTIVE),
        Op.GATHER: _plain(Lane.COLLECTIVE),
        Op.RELEASE: _plain(Lane.COMPUTE),
        Op.OFFLOAD: OpSpec(Lane.COPY, lambda a: _parked("P", a), _none, _offload_memory),
        Op.FETCH: OpSpec(Lane.COPY, _none, lambda a, _s: _parked("U", a), _fetch_memory),
        Op.HOLD: OpSpec(Lane.COPY, _none, lambda a, _s: _parked("P", a), _hold_memory),
        Op.RETURN: OpSpec(Lane.COPY, lambda a: _parked("U", a), _none, _hold_memory),
        Op.SWAPIN: _plain(Lane.COPY),
        Op.SWAPOUT: _plain(Lane.COPY),
        Op.SEND: _plain(Lane.TRANSFER),
        Op.RECV: _plain(Lane.TRANSFER),
    }
)

PASSES: frozenset[Op] = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R, Op.REDO})
"""Operations on microbatches that read weights."""

MOVES: frozenset[Op] = frozenset({Op.OFFLOAD, Op.FETCH, Op.HOLD, Op.RETURN})
"""Operations on microbatches that move the activations that a forward has kept."""

SWAPS: frozenset[Op] = frozenset({Op.SWAPIN, Op.SWAPOUT})
"""Operations on batches that move the optimizer state of a stage."""

ACCEPTING: frozenset[Op] = frozenset({Op.HOLD, Op.FETCH})
"""Moves that take what comes from a peer as soon as it comes: whoever uses it waits for it."""


def gives(action: Action) -> list[Fact]:
    """Return the facts that hold once an action is done."""
    return [fact for part in action.parts or (action,) for fact in OPS[part.op].gives(part)]
