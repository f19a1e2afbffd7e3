"""A schedule as one rank of a job holds it: what is said of all ranks, and the actions of its own.

Another rank has built the schedule. What a rank needs of the others' programs are a few facts, which grow with the
stages and not with the microbatches; they travel as plain values. Whoever looks at all programs has them built then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from penstock.schedule.ir.schedule import Edge, Op, Payload, Program, Schedule, Stage, format_action
from penstock.schedule.ir.sharding import read_sharding
from penstock.schedule.machine.instructions import Instruction, Lowered, LoweredProgram, Message, Route
from penstock.schedule.proof.data_read_ahead import Reading
from penstock.schedule.proof.proof import Proof, StageFacts
from penstock.schedule.stage_state.stage_state import Delay
from penstock.schedule.text_parser import parse_action

Json = Any
"""A value of numbers, texts, lists and None, as `json.loads` returns it."""
_ADDED = (Op.SEND, Op.RECV, Op.REDO)
"""What lowering adds to a program."""


class RankSchedule(Schedule):
    """A schedule of which the program of one rank is known, and others are built when somebody asks for them."""

    _rank = -1
    _own: Program | None = None
    _ranks: int | None = None
    _build: Callable[[], Schedule]

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """What each rank runs; built at the first look."""
        return self._build().programs

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.programs) if self._ranks is None else self._ranks

    def program(self, rank: int) -> Program:
        """Return what a rank runs; nothing is built for that of this one."""
        return self._own if rank == self._rank and self._own is not None else self.programs[rank]

    def held_by(self, rank: int, own: Program) -> RankSchedule:
        """Return the same with the program of a rank."""
        held = RankSchedule.__new__(RankSchedule)
        held.__dict__.update(self.__dict__, _rank=rank, _own=own)
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the whole schedule be pickled or copied in place of this one, whose way to build it cannot be."""
        return Schedule, _whole_fields(self)

    def __eq__(self, other: object) -> bool:
        """Compare with another schedule, of which it may be a part; this builds both."""
        return isinstance(other, Schedule) and whole(self) == whole(other)

    def __hash__(self) -> int:
        """Return the hash of the whole schedule."""
        return hash(whole(self))


def whole(schedule: Schedule) -> Schedule:
    """Return a schedule with the programs of all ranks."""
    if not isinstance(schedule, RankSchedule):
        return schedule
    return Schedule(*_whole_fields(schedule))


def _whole_fields(schedule: Schedule) -> tuple[Any, ...]:
    return tuple([getattr(schedule, name) for name in Schedule.__dataclass_fields__])


def schedule_facts(schedule: Schedule) -> Json:
    """Return what all ranks need of a schedule."""
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "stages": [list(stage) for stage in schedule.stages],
        "edges": [[source, target, int(backward)] for source, target, backward in schedule.edges],
        "rule": schedule.rule,
        "frozen": sorted(schedule.frozen),
        "segments": [list(segment) for segment in schedule.segments],
        "window": schedule.window,
        "sharding": str(schedule.sharding),
        "ranks": schedule.ranks,
        "recomputed": sorted(schedule.recomputed),
        "slices": schedule.slices,
        "operations": sorted(op.value for op in schedule.operations),
        "deciding": [list(stage) for stage in schedule.deciding],
        "first_trained": schedule.first_trained,
        "actions": schedule.actions_hash,
    }


def rank_schedule(facts: Json, build: Callable[[], Schedule]) -> RankSchedule:
    """Return the schedule that another rank has built.

    Args:
        facts: what `schedule_facts` returned there.
        build: builds the same one here, if that is ever asked for.
    """
    found = RankSchedule.__new__(RankSchedule)
    found.__dict__.update(
        name=facts["name"],
        microbatches=facts["microbatches"],
        stages=tuple([Stage(*stage) for stage in facts["stages"]]),
        edges=tuple([Edge(source, target, bool(backward)) for source, target, backward in facts["edges"]]),
        rule=facts["rule"],
        frozen=frozenset(facts["frozen"]),
        segments=tuple([tuple(segment) for segment in facts["segments"]]),
        window=facts["window"],
        sharding=read_sharding(facts["sharding"]),
        recomputed=frozenset(facts["recomputed"]),
        slices=facts["slices"],
        operations=frozenset(map(Op, facts["operations"])),
        deciding=tuple([Stage(*stage) for stage in facts["deciding"]]),
        first_trained=facts["first_trained"],
        actions_hash=facts["actions"],
        _ranks=facts["ranks"],
        _build=build,
    )
    return found


# A proof in parts: what one rank of a pipeline needs of it, as plain values that can be sent to that rank.
#
# A job proves a schedule once. Every rank then gets what all have in common (the facts of the stages, the routes, the
# window) and the lowered program of its own, whose actions are in the text form of `penstock.schedule.text_parser`.


@dataclass(frozen=True, repr=False)
class RankProof(Proof):
    """A proof as one rank holds it, which another one has made: `lowered` has the program of that rank only.

    Attributes:
        border: why nothing may be run between two batches; None if it may.
        read: how far ranks read ahead.
    """

    border: str | None = None
    read: Reading = field(default_factory=Reading)

    @cached_property
    def border_fault(self) -> str | None:
        """Why nothing may be run at the borders of batches; None if it may."""
        return self.border

    @cached_property
    def reading(self) -> Reading:
        """How far ranks read ahead."""
        return self.read


def common_part(proof: Proof) -> Json:
    """Return what all ranks need of a proof: it grows with the stages, not with the microbatches."""
    return {
        "window": proof.lowered.window,
        "steady": proof.steady_from,
        "border": proof.border_fault,
        "reading": list(proof.reading),
        "activations": [[each.numerator, each.denominator] for each in proof.activations],
        "facts": [_facts(proof.stages[stage]) for stage in proof.schedule.stages],
        "routes": [
            [r.payload.value, r.source.index, r.source.direction, r.target.index, r.target.direction, r.count, r.slice]
            for r in proof.lowered.routes
        ],
    }


def part_of_rank(lowered: Lowered, rank: int) -> Json:
    """Return the lowered program of one rank: its period, its epilogue, and the period with a rejected version."""
    return [[_written(instruction) for instruction in part] for part in lowered.programs[rank]]


def own_program(lowered: Lowered, rank: int, own: Json) -> Lowered:
    """Return a lowered schedule with the program of one rank only, for which `part_of_rank` returned `own`."""
    schedule, nothing = lowered.schedule, LoweredProgram((), ())
    mine = LoweredProgram(*(tuple([_read(each, schedule, rank) for each in part]) for part in own))
    return replace(lowered, programs=tuple(mine if r == rank else nothing for r in range(schedule.ranks)))


def rank_proof(schedule: Schedule, rank: int, common: Json, own: Json) -> RankProof:
    """Put the proof of a schedule together on one rank.

    Args:
        schedule: the one that has been proven, as this rank has it.
        rank: of whom `own` is.
        common: what `common_part` returned.
        own: what `part_of_rank` returned.
    """
    at = schedule.stage_at
    routes = tuple(
        Route(Payload(payload), at[source, a], at[target, b], count, tuple(piece) if piece else None)
        for payload, source, a, target, b, count, piece in common["routes"]
    )
    lowered = own_program(Lowered(schedule, routes, (), common["window"]), rank, own)
    if isinstance(schedule, RankSchedule):
        lowered = replace(lowered, schedule=schedule.held_by(rank, _plain(lowered.programs[rank])))
    facts = [
        StageFacts(versions, copies, gradients, buffers, Delay(*delay), recompute)
        for versions, copies, gradients, buffers, delay, recompute in common["facts"]
    ]
    return RankProof(
        lowered,
        dict(zip(schedule.stages, facts, strict=True)),
        tuple(Fraction(*each) for each in common["activations"]),
        common["steady"],
        border=common["border"],
        read=Reading(*common["reading"]),
    )


def _plain(program: LoweredProgram) -> Program:
    """The actions of a lowered program, without messages."""
    period, epilogue = (tuple([i.action for i in part if i.action.op not in _ADDED]) for part in program[:2])
    return Program(period, epilogue)


def _facts(facts: StageFacts) -> Json:
    numbers = facts.versions, facts.copies, facts.gradients, facts.buffers
    return [*numbers, list(facts.delay), facts.recompute_delay]


def _written(instruction: Instruction) -> Json:
    """Write an instruction: a text alone where it has no messages, and no report goes before it."""
    action, route, needs, ahead, awaits, reports = instruction
    text = format_action(action, relative=True)
    if route < 0 and not needs and not awaits and reports is None:
        return text
    return [text, route, _flat(needs), int(ahead), _flat(awaits), *([] if reports is None else [reports])]


def _flat(messages: Sequence[Message]) -> list[int]:
    return [number for message in messages for number in message]


def _read(written: Json, schedule: Schedule, rank: int) -> Instruction:
    if isinstance(written, str):
        return Instruction(parse_action(written, schedule.stages, rank))
    text, route, needs, ahead, awaits, *reports = written
    action = parse_action(text, schedule.stages, rank)
    return Instruction(action, route, _messages(needs), bool(ahead), _messages(awaits), *reports)


def _messages(numbers: Sequence[int]) -> tuple[Message, ...]:
    return tuple([Message(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)])
