"""The schedule: which actions each rank runs, in which order, on which weights.

A `Schedule` is a frozen value with one `Program` per rank. A program has a *period*, written once for every
batch t >= 0, and an *epilogue* that drains the pipeline:

    period of batch 0, period of batch 1, ..., period of batch T-1, epilogue

In a period every number is relative to batch t: microbatch 3 is the fourth of batch t, microbatch -1 is the last
of batch t-1, `STEP[t-2]` belongs to batch t-2, and version t-1 is the weights after t-1 batches. Actions
that would belong to a batch or microbatch before the first one vanish: that is the prologue. In an epilogue the
numbers are relative to T, the batch after the last one.

Schedules hold no times, costs or tensors. docs/ir.md shows every method in this form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from penstock.schedule.ir.sharding import REPLICATED, Sharding

WINDOW = 2  # messages on a lane at the least: one may travel while the one before it is used


class Op(StrEnum):
    """The operation of an action. `schedule.ir.op_table` registers the lane, dependencies and memory of each."""

    F = "F"  # forward
    B = "B"  # full backward: gradients of inputs and weights
    I = "I"  # noqa: E741 - backward for the inputs only (the zero-bubble papers' B)
    W = "W"  # backward for the weights only
    R = "R"  # recompute of a forward
    REDO = "REDO"  # a forward again, because the version it read was rejected; added when a schedule is lowered
    STEP = "STEP"  # optimizer update: creates version batch+1
    PREDICT = "PREDICT"  # creates a derived copy of the weights (prediction, correction, blend)
    VALIDATE = "VALIDATE"  # the global decision on a provisional version
    REDUCE = (
        "REDUCE"  # sum of gradients over the copies of a stage and over parallel pipelines, of which a shard may stay
    )
    TIE = "TIE"  # sum of the gradients of parameters that several stages share
    DECIDE = "DECIDE"  # decision of all stages: global norm, overflow, loss weight
    AVERAGE = "AVERAGE"  # average of weights over parallel pipelines
    GATHER = "GATHER"  # make a version whole, of which each parallel pipeline has a shard
    RELEASE = "RELEASE"  # free a gathered version, of which the shard stays
    OFFLOAD = "OFFLOAD"  # move the activations of a unit to host memory or (with a peer) to another rank
    FETCH = "FETCH"  # move them back
    HOLD = "HOLD"  # receive the activations of a peer's unit, to hold them
    RETURN = "RETURN"  # send them back
    SWAPIN = "SWAPIN"  # fetch the optimizer state of a stage from the memory of the host
    SWAPOUT = "SWAPOUT"  # move it back there
    SEND = "SEND"
    RECV = "RECV"
    FUSED = "FUSED"  # several passes run as one overlapped action


class Kind(StrEnum):
    """The kind of a unit: training microbatches, forward-only microbatches, or whole batches."""

    TRAIN = "train"
    EVAL = "eval"
    BATCH = "batch"


class Payload(StrEnum):
    """The content of a message. Each payload has its own first-in first-out lane between two ranks."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    RECOMPUTE = "recompute"
    PARKED = "parked"  # activations of another rank
    REPAIR = "repair"  # an activation recomputed after a rejected version


class Stage(NamedTuple):
    """A consecutive part of the model, held by a rank.

    A bidirectional pipeline holds every part several times (`direction` tells them apart, as the down and up pipelines
    of Chimera), and a rank may hold several stages (interleaved and V-shaped placements).
    """

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody wants of a stage
    direction: int
    rank: int

    @property
    def name(self) -> str:
        """The index, or `index.direction` where the direction is not 0."""
        return f"{self.index}.{self.direction}" if self.direction else str(self.index)


class Unit(NamedTuple):
    """The work of one action: `count` microbatches from `first` on, slice j of k of one microbatch, or a batch."""

    first: int
    count: int = 1  # type: ignore[assignment]  # shadows tuple.count, which nobody wants of a unit
    slice: tuple[int, int] | None = None
    kind: Kind = Kind.TRAIN
    every: int = 1  # batch units only: exists for batches b with (b + 1) % every == 0

    @property
    def microbatches(self) -> range:
        """The microbatch numbers covered."""
        return range(self.first, self.first + self.count)


class Copy(NamedTuple):
    """The name of a derived weight copy: a label, and the microbatch for which a PREDICT made it."""

    label: str
    first: int


class WeightRef(NamedTuple):
    """The weights that an action reads: one version, or several that a prediction or blend is made of.

    `derive` names the copy: on a PREDICT the copy it makes, elsewhere the copy that is read.
    """

    versions: tuple[int, ...]
    derive: Copy | None = None


class Action(NamedTuple):
    """One operation on one unit at one stage: an entry of a rank's program."""

    op: Op
    stage: Stage
    unit: Unit
    reads: WeightRef | None = None
    parts: tuple[Action, ...] = ()  # FUSED: the passes that run together
    peer: Stage | None = None  # SEND and RECV, OFFLOAD to RETURN: the other end
    payload: Payload | None = None  # of the same operations: what is transferred

    def __str__(self) -> str:
        return format_action(self)


class Edge(NamedTuple):
    """A data flow from stage `source` to stage `target`; without `backward` no gradient returns."""

    source: int
    target: int
    backward: bool = True


class Program(NamedTuple):
    """The actions of one rank: the period, repeated for each batch, and the epilogue that drains the pipeline."""

    period: tuple[Action, ...]
    epilogue: tuple[Action, ...] = ()

    def passes(self) -> Iterator[Action]:
        """Yield the actions of the period, with fused ones split."""
        return split_fused(self.period)


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline runs, in which order and on which weights; `print` shows it as text.

    Attributes:
        name: of the method, for people.
        microbatches: m, the microbatches of a batch (of one update) in this pipeline, both directions together.
        stages: every stage with its rank.
        edges: which stage takes the output of which.
        programs: what each rank runs.
        rule: the name of the version rule (`penstock.schedule.ir.version_rules.RULES`).
        frozen: stages without trained weights and without a backward.
        segments: groups of consecutive stages that recompute together; only the first of each keeps its input.
        window: the number of messages that may be outstanding on a connection, on either side, each of which takes
            memory. None leaves it open: a proof, and so a run, takes the least that costs no time when a forward takes
            1, a backward 2 and a message none; a simulation the least that costs none at its costs.
        sharding: what of the state of stages is split over parallel pipelines.
    """

    name: str
    microbatches: int
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    programs: tuple[Program, ...]
    rule: str
    frozen: frozenset[int] = frozenset()
    segments: tuple[tuple[int, ...], ...] = ()
    window: int | None = None
    sharding: Sharding = REPLICATED

    def __repr__(self) -> str:
        """Return its name and size; `str` returns the text form."""
        return (
            f"<Schedule {self.name}: {self.num_stages} stages on {self.ranks} ranks, {self.microbatches} microbatches>"
        )

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.programs)

    @cached_property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return 1 + max(stage.index for stage in self.stages)

    @cached_property
    def predecessors(self) -> dict[int, tuple[Edge, ...]]:
        """The incoming edges of each stage."""
        return {c: tuple(e for e in self.edges if e.target == c) for c in range(self.num_stages)}

    @cached_property
    def successors(self) -> dict[int, tuple[Edge, ...]]:
        """The outgoing edges of each stage."""
        return {c: tuple(e for e in self.edges if e.source == c) for c in range(self.num_stages)}

    @cached_property
    def stage_at(self) -> dict[tuple[int, int], Stage]:
        """The stage of each (index, direction)."""
        return {(n.index, n.direction): n for n in self.stages}

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """The stages whose forward is recomputed before the backward."""
        return frozenset(a.stage.index for program in self.programs for a in program.period if a.op is Op.R)

    @cached_property
    def slices(self) -> int:
        """k, the number of slices of a sequence; 1 where units are whole microbatches."""
        return max((a.unit.slice[1] for p in self.programs for a in p.period if a.unit.slice), default=1)

    @cached_property
    def directions(self) -> int:
        """The largest number of copies of a stage."""
        return 1 + max(stage.direction for stage in self.stages)

    @cached_property
    def chunks(self) -> dict[Stage, int]:
        """The number of stages of the same direction on the rank of each stage: v of an interleaved placement."""
        held = Counter((n.direction, n.rank) for n in self.stages)
        return {n: held[n.direction, n.rank] for n in self.stages}

    @cached_property
    def operations(self) -> frozenset[Op]:
        """The operations of all periods, with fused actions split."""
        return frozenset(action.op for action in self.passes())

    @cached_property
    def deciding(self) -> tuple[Stage, ...]:
        """The stages whose updates wait for a decision of all stages."""
        found = {a.stage for p in self.programs for a in p.period if a.op is Op.DECIDE}
        return tuple(stage for stage in self.stages if stage in found)

    @cached_property
    def first_trained(self) -> int:
        """The first stage that is updated; 0 if none is."""
        return min((a.stage.index for p in self.programs for a in p.period if a.op is Op.STEP), default=0)

    @cached_property
    def actions_hash(self) -> int:
        """A number that equal programs have in common, within one process."""
        return hash(self.programs)

    def program(self, rank: int) -> Program:
        """Return what a rank runs."""
        return self.programs[rank]

    def segment_before(self, index: int) -> int | None:
        """Return the stage that passes recomputed activations to stage `index`, or None if it keeps its own input."""
        for segment in self.segments:
            if index in segment[1:]:
                return segment[segment.index(index) - 1]
        return None

    def passes(self) -> Iterator[Action]:
        """Yield the actions of the period of every rank, rank by rank, with fused ones split."""
        for program in self.programs:
            yield from program.passes()

    def on_rank(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages of a rank, by index."""
        return self._of_rank.get(rank, ())

    @cached_property
    def _of_rank(self) -> dict[int, tuple[Stage, ...]]:
        """The stages of each rank that holds any, by index."""
        found: dict[int, list[Stage]] = {}
        for stage in sorted(self.stages):
            found.setdefault(stage.rank, []).append(stage)
        return {rank: tuple(stages) for rank, stages in found.items()}

    def __str__(self) -> str:
        return format_schedule(self)


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a model without branches: stage i feeds stage i+1."""
    return tuple(Edge(i, i + 1) for i in range(num_stages - 1))


def straight(ranks: int) -> tuple[Stage, ...]:
    """Place one stage on each rank, in order."""
    return tuple(Stage(r, 0, r) for r in range(ranks))


def passes(action: Action) -> tuple[Action, ...]:
    """Return the parts of a fused action, or the action itself."""
    return action.parts or (action,)


def split_fused(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the actions in order, with fused ones split into their passes."""
    for action in actions:
        yield from passes(action)


def format_unit(unit: Unit, relative: bool = False) -> str:
    """Format a unit: `3`, `0..3`, `3:1/2`, `e3` for microbatches; `[5]`, or `[t-2]` if relative, for batches."""
    if unit.kind is Kind.BATCH:
        every = f"%{unit.every}" if unit.every > 1 else ""
        return f"[{_number(unit.first, relative)}]{every}"
    text = str(unit.first) if unit.count == 1 else f"{unit.first}..{unit.first + unit.count - 1}"
    if unit.slice:
        text += f":{unit.slice[0]}/{unit.slice[1]}"
    return f"e{text}" if unit.kind is Kind.EVAL else text


_GIVING = (Op.SEND, Op.OFFLOAD, Op.RETURN)


def format_action(action: Action, relative: bool = False, stage: bool = True) -> str:
    """Format an action as text; `penstock.schedule.text_parser` holds the grammar.

    Args:
        action: the action.
        relative: numbers are relative to batch t, as in a period.
        stage: include the stage, which is redundant where the rank has only one.
    """
    if action.parts:
        return "[" + "+".join(format_action(p, relative, stage) for p in action.parts) + "]"
    text = action.op.value + format_unit(action.unit, relative)
    if action.peer is not None:
        return f"{text}@{action.stage.name}{'>' if action.op in _GIVING else '<'}{action.peer.name}/{action.payload}"
    if stage:
        text += f"@{action.stage.name}"
    if action.reads is not None:
        text += "^" + ",".join(_number(v, relative) for v in action.reads.versions)
        if action.reads.derive is not None:
            text += f"~{action.reads.derive.label}{action.reads.derive.first}"
    return text


def format_place(schedule: Schedule, action: Action) -> str:
    """Format an action of a program with its rank, as the text form has it but for versions: "rank 1, B0".

    Args:
        schedule: that the action is of; where a rank holds several stages, the one of the action is named.
        action: with relative numbers.
    """
    plain = action._replace(reads=None, parts=tuple(p._replace(reads=None) for p in action.parts))
    rank = action.stage.rank
    return f"rank {rank}, {format_action(plain, relative=True, stage=len(schedule.on_rank(rank)) != 1)}"


def format_schedule(schedule: Schedule) -> str:
    """Format a schedule as text; `penstock.schedule.text_parser.parse_schedule` parses it back to an equal schedule."""
    lines = [f"schedule {schedule.name}", f"rule {schedule.rule}", f"microbatches {schedule.microbatches}"]
    lines.append("nodes " + " ".join(f"{n.name}@{n.rank}" for n in schedule.stages))
    if schedule.edges != chain(schedule.num_stages):
        lines.append(
            " ".join(["edges", *(f"{e.source}{'>' if e.backward else '|'}{e.target}" for e in schedule.edges)])
        )
    if schedule.frozen:
        lines.append("frozen " + " ".join(map(str, sorted(schedule.frozen))))
    if schedule.segments:
        lines.append("segments " + " ".join(",".join(map(str, s)) for s in schedule.segments))
    if schedule.window is not None:
        lines.append(f"window {schedule.window}")
    if schedule.sharding != REPLICATED:
        lines.append(f"sharding {schedule.sharding}")
    for what, part in (("rank", 0), ("drain", 1)):
        for rank, program in enumerate(schedule.programs):
            if program[part] or not part:
                several = len(schedule.on_rank(rank)) > 1
                actions = " ".join(format_action(a, relative=True, stage=several) for a in program[part])
                lines.append(f"{what} {rank}: {actions}")
    return "\n".join(lines) + "\n"


def _number(value: int, relative: bool) -> str:
    if not relative:
        return str(value)
    return f"t{value:+d}" if value else "t"
