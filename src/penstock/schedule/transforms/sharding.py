"""Shard the state of a schedule's stages over parallel pipelines: add the GATHERs, RELEASEs and REDUCEs that it takes.

With level full the passes of a rank decide which of its stages are gathered when (`gather_slots`): a GATHER stands
where its place becomes free, directly behind the last pass that needs the stage before it, and so is under way as early
as possible. With levels optimizer and gradients a GATHER behind each STEP completes in place the version of which the
STEP has written a shard. Where batches overlap (2BW), both move into the slack between the last backward of a batch and
the first forward of the batch after the next, so that the sum before them and the gather behind them have time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedule.ir.op_table import PASSES
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, Stage, WeightRef, passes
from penstock.schedule.ir.sharding import Cache, Level, Sharding
from penstock.schedule.transforms.batch_ops import batch_unit, is_backward, with_reductions
from penstock.schedule.transforms.gather_slots import stays

_PLACES = 2  # gathered stages, and full-size gradients: one in use, one on its way
_LEVELS = {"flush": frozenset(Level), "double-buffer": frozenset(Level) - {Level.FULL}}
_METHODS = {"none": "2bw", "2bw-ahead": "2bw-ahead"}  # of corrections that go with them: a method of double-buffer
_SETTLING = 3  # periods in which fewer batches overlap than in later ones
_UNROLLED = 12


def sharding_fault(rule: str, level: Level, correction: str = "none", in_turns: bool = True) -> str | None:
    """Say why the state of stages cannot be sharded under a version rule and a correction; None if it can.

    Args:
        rule, level, correction: which.
        in_turns: whether a rank alternates between passes of its stages and versions with every microbatch.
    """
    if level is Level.NONE:
        return None
    if rule not in _LEVELS:
        return (
            f"sharding {level} goes with the rules {' and '.join(_LEVELS)} so far, not with {rule!r}, under which "
            "stages step at times of their own, read copies, keep three versions, or read updates before they are "
            "decided on; set sharding to none"
        )
    if correction not in _METHODS:
        return (
            f"sharding {level} does not go with correction {correction!r}, which is not known to work on a shard of a "
            f"stage alone; take {' or '.join(_METHODS.values())}, or set sharding to none"
        )
    if level not in _LEVELS[rule] and in_turns:
        levels = " or ".join(each for each in Level if each in _LEVELS[rule] - {Level.NONE})
        return (
            f"sharding {level} does not go with rule {rule!r}: batches overlap in this order, so ranks would have two "
            f"versions of all their stages whole, or gather them again with every microbatch; take {levels}, or a "
            "breadth-first order: layered, which flushes, or 2bw-layered"
        )
    return None


def with_sharding(schedule: Schedule, sharding: Sharding) -> Schedule:
    """Split the state of all trained stages over parallel pipelines.

    Args:
        schedule: with its STEPs, and not sharded.
        sharding: what is split; where it leaves the numbers of places open, they are chosen: two gathered stages with
            level full, and of full-size gradients two (full), or one more than accumulate at once (gradients). The
            gradients of stages with several copies in the pipeline are always whole until they are complete.

    Raises:
        ConfigError: the version rule does not go with it, the schedule is sharded already, or the places do not do.
    """
    if sharding.level is Level.NONE:
        return schedule
    if schedule.sharding.level is not Level.NONE:
        raise ConfigError(f"{schedule.name}: the schedule is sharded already ({schedule.sharding})")
    fault = sharding_fault(schedule.rule, sharding.level, in_turns=_in_turns(schedule))
    if fault is not None:
        raise ConfigError(f"{schedule.name}: {fault}")
    if not any(a.op is Op.REDUCE for program in schedule.programs for a in program.period):
        schedule = with_reductions(schedule, everywhere=True)
    if sharding.level is not Level.FULL:
        schedule = _with_completions(schedule)
    made = replace(schedule, sharding=_with_places(schedule, sharding))
    if schedule.rule == "double-buffer" and sharding.level is Level.FULL:
        if sharding.cache is Cache.DIRECT:
            raise ConfigError(
                f"{schedule.name}: batches overlap, so two versions of a stage want its one place; cache=direct goes "
                "with methods that flush, such as layered, so leave it out"
            )
        weights = made.sharding.weights or _PLACES
        return replace(made, programs=tuple(with_overlapping_gathers(made, p, weights) for p in made.programs))
    return replace(made, programs=tuple(_placed(made, program) for program in made.programs))


# --- completions of the newest version --------------------------------------------------------------------------------


def _with_completions(schedule: Schedule) -> Schedule:
    """Add a GATHER behind each STEP, and where batches overlap move both into the slack.

    Where stages are held several times, ranks of a pipeline take part in the GATHERs of each other. So they are in one
    order on all ranks there, that of stages, behind the last STEP: a sum that is late then holds up no other GATHER.
    """
    programs, several = schedule.programs, _held_several_times(schedule)
    if schedule.rule == "double-buffer":
        programs = tuple(_in_slack(program, schedule.microbatches) for program in programs)

    def completed(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        found = []
        for action in actions:
            found.append(action)
            if action.op is Op.STEP:
                found.append(action._replace(op=Op.GATHER, reads=WeightRef((action.unit.first + 1,))))
        if several:
            gathers = sorted((a for a in found if a.op is Op.GATHER), key=lambda a: a.stage)
            found = [*(a for a in found if a.op is not Op.GATHER), *gathers]
        return tuple(found)

    return replace(schedule, programs=tuple(Program(*map(completed, program)) for program in programs))


def _in_slack(program: Program, m: int) -> Program:
    """Move STEPs to the middle between the last backward of their batch and the first forward of the next but one.

    That is the last backward on the rank, of any of its stages, as all may decide together.
    """
    period = [a for a in program.period if a.op is not Op.STEP]
    trained = dict.fromkeys(a.stage for a in program.period if a.op is Op.STEP)
    ended = 0  # of a batch, counted from the start of its own period
    for i, action in enumerate(period):
        for p in passes(action):
            if is_backward(p, p.stage) or p.op is Op.REDUCE:
                batch = p.unit.first if p.op is Op.REDUCE else p.unit.first // m
                ended = max(ended, i - batch * len(period))
    before: dict[int, list[Action]] = defaultdict(list)  # position -> STEPs
    drained: list[Action] = []
    for stage in trained:
        first = next(i for i, a in enumerate(period) if any(p.op is Op.F and p.stage == stage for p in passes(a)))
        slack = 2 * len(period) + first - ended - 1
        later, place = divmod(ended + 1 + slack // 2, len(period))
        before[place].append(Action(Op.STEP, stage, batch_unit(-later)))
        drained += [Action(Op.STEP, stage, batch_unit(b)) for b in range(-later, 0)]
    moved = [each for i, action in enumerate(period) for each in (*before[i], action)]
    rest = tuple(a for a in program.epilogue if a.op is not Op.STEP)
    early, late = ([a for a in drained if (a.unit.first < -1) is older] for older in (True, False))
    return Program(tuple(moved), (*early, *rest, *late))


_RUNS = 4  # of passes that read one version of a stage, one after the other: forwards, and backwards in two parts


def _in_turns(schedule: Schedule) -> bool:
    """Whether a rank alternates between the versions of its stages with every microbatch."""
    for program in schedule.programs:
        read = [(p.stage, p.reads) for p in program.passes() if p.op in PASSES and p.reads is not None]
        begun = Counter(after for before, after in pairwise([None, *read]) if after != before)
        if max(begun.values(), default=0) >= _RUNS:
            return True
    return False


# --- what is whole ----------------------------------------------------------------------------------------------------


def _with_places(schedule: Schedule, sharding: Sharding) -> Sharding:
    """Return a sharding with the numbers of places that are left open."""
    weights = gradients = None
    if sharding.level is Level.FULL:
        together = max(
            (len({p.stage for p in passes(a)}) for program in schedule.programs for a in program.period), default=1
        )
        weights = sharding.weights or max(_PLACES, together)
    several = _held_several_times(schedule)
    if several and sharding.gradients is not None:
        raise ConfigError(
            f"{schedule.name}: stages have several copies in the pipeline, whose gradients stay whole until all are "
            f"complete, so they cannot be limited to {sharding.gradients}; leave gradients={sharding.gradients} out"
        )
    if sharding.level.splits_gradients and not several:
        gradients = sharding.gradients or _PLACES
        if sharding.gradients is None and sharding.level is Level.GRADIENTS:
            gradients = 1 + max(map(_accumulating, schedule.programs), default=1)
    return sharding._replace(weights=weights, gradients=gradients)


def _held_several_times(schedule: Schedule) -> bool:
    return max(Counter(stage.index for stage in schedule.stages).values()) > 1


def _accumulating(program: Program) -> int:
    """Return the most gradients to which a rank adds in turns."""
    uses = _uses(program.period, (Op.B, Op.I, Op.W))
    first: dict[Stage, int] = {}
    last: dict[Stage, int] = {}
    for position, here in enumerate(uses):
        for stage in here:
            first.setdefault(stage, position)
            last[stage] = position
    return max((sum(first[s] <= i <= last[s] for s in first) for i in range(len(uses))), default=0)


def _uses(actions: tuple[Action, ...], ops: tuple[Op, ...] | frozenset[Op]) -> list[set[Stage]]:
    """Return the trained stages of which each action runs one of these operations."""
    trained = {p.stage for a in actions for p in passes(a) if p.op is Op.STEP}
    return [{p.stage for p in passes(a) if p.op in ops and p.stage in trained} for a in actions]


def _placed(schedule: Schedule, program: Program) -> Program:
    """Add the GATHERs and RELEASEs of a rank, and the REDUCEs of gradients that give up their places."""
    sharding, period = schedule.sharding, program.period
    behind: dict[int, list[Action]] = defaultdict(list)
    if sharding.level is Level.FULL and sharding.weights is not None:
        for stay in stays(_uses(period, PASSES), sharding.weights, sharding.cache):
            whole = Action(Op.GATHER, stay.stage, batch_unit(0), WeightRef((0,)))
            behind[stay.last].insert(0, whole._replace(op=Op.RELEASE))
            behind[stay.since].append(whole)
    if sharding.gradients is not None and not program.epilogue:
        uses = _uses(period, (Op.B, Op.I, Op.W))
        final = {stage: i for i, here in enumerate(uses) for stage in here}
        for stay in stays(uses, sharding.gradients, sharding.cache, leave=final):
            if stay.last < final[stay.stage]:
                behind[stay.last].append(Action(Op.REDUCE, stay.stage, batch_unit(0)))
    if _held_several_times(schedule) and sharding.level is Level.FULL:  # so that no GATHER waits behind another rank
        period = _reduced_last(period)
        assert not any(behind[i] for i, a in enumerate(program.period) if a.op is Op.REDUCE)
        kept = [i for i, a in enumerate(program.period) if a.op is not Op.REDUCE]
        behind = defaultdict(list, {-1: behind[-1], **{n: behind[i] for n, i in enumerate(kept)}})
    made = behind[-1] + [each for i, action in enumerate(period) for each in (action, *behind[i])]
    return Program(tuple(made), program.epilogue)


def _reduced_last(period: tuple[Action, ...]) -> tuple[Action, ...]:
    """Move the REDUCEs of a rank behind its last pass."""
    rest = [a for a in period if a.op is not Op.REDUCE]
    sums = sorted((a for a in period if a.op is Op.REDUCE), key=lambda a: a.stage)
    place = 1 + max((i for i, a in enumerate(rest) if any(p.op in PASSES for p in passes(a))), default=-1)
    return (*rest[:place], *sums, *rest[place:])


# Fully sharded state where batches overlap: which version of which stage is whole when.
#
# Passes of two batches read two versions of a stage, so versions of stages have places, not stages. A rank's period is
# unrolled, and what becomes of its places in the midst of that is its period. A version that is read in the next period
# may be gathered in this one, if it is one of a batch that has begun: then it is read there, or in the epilogue of a
# span that ends here. Updates of a batch stand at the end of the next period, so that the sum of its last gradient has
# time, and no gather of the new version waits for them.


class WholeStage(NamedTuple):
    """A version of a stage."""

    stage: Stage
    version: int

    @property
    def rank(self) -> int:
        """The rank of the stage."""
        return self.stage.rank

    @property
    def name(self) -> str:
        """The stage and its version, for people."""
        return f"{self.stage.name} (version {self.version})"


@dataclass(frozen=True)
class _Gather:
    """A version that is whole for some time; all numbers count through the periods.

    Attributes:
        whole: which.
        batch: that its passes are of.
        period, behind: where the GATHER stands: behind the action with that index in its period.
        last: period and index of its last use.
    """

    whole: WholeStage
    batch: int
    period: int
    behind: int
    last: tuple[int, int]

    def action(self, op: Op, period: int) -> Action:
        """Return the GATHER or RELEASE, with numbers relative to a period."""
        reads = WeightRef((self.whole.version - period,))
        return Action(op, self.whole.stage, batch_unit(self.batch - period), reads)


def with_overlapping_gathers(schedule: Schedule, program: Program, slots: int) -> Program:
    """Add the GATHERs and RELEASEs of a rank whose batches overlap, and move its STEPs to the end of the period.

    Args:
        schedule: with REDUCEs, under rule double-buffer.
        program: of the rank.
        slots: places for gathered versions.

    Raises:
        ConfigError: the places do not do, or batches overlap so much that they do not settle.
    """
    program = _stepping_at_the_end(program)
    gathers = _gathers(program.period, schedule.microbatches, slots)
    for number in range(_SETTLING, _UNROLLED - _SETTLING):
        period, next_one = (_with_gathers(program.period, gathers, each) for each in (number, number + 1))
        if period == next_one:
            return Program(period, _drained(program.epilogue, gathers, number + 1, schedule.microbatches))
    raise ConfigError(
        f"{schedule.name}: with {slots} gathered stages no batch is like the one before it on rank "
        f"{program.period[0].stage.rank}; take another number of them, or more microbatches"
    )


def _stepping_at_the_end(program: Program) -> Program:
    """Move the STEPs of batch t - 1 to the end of the period of batch t, and to that of the epilogue."""
    trained = dict.fromkeys(a.stage for a in program.period if a.op is Op.STEP)
    steps = tuple(Action(Op.STEP, stage, batch_unit(-1)) for stage in trained)
    return Program(*((*(a for a in part if a.op is not Op.STEP), *steps) for part in program))


def _gathers(period: tuple[Action, ...], m: int, slots: int) -> list[_Gather]:
    """Return what is whole in many periods."""
    uses: list[set[WholeStage]] = []
    batches: dict[tuple[int, WholeStage], int] = {}  # position and what is read there -> batch
    for number in range(_UNROLLED):
        for action in period:
            read = {
                WholeStage(p.stage, p.reads.versions[0] + number): p.unit.first // m + number
                for p in passes(action)
                if p.op in PASSES and p.reads is not None
            }
            batches |= {(len(uses), whole): batch for whole, batch in read.items()}
            uses.append(set(read))
    found = []
    for stay in stays(uses, slots):
        batch, length = batches[stay.first, stay.stage], len(period)
        begins = max(batch, stay.stage.version) * length - 1  # of a batch that has begun; and STEPs end a period
        behind = divmod(stay.since, length) if stay.since > begins else (begins // length + 1, -1)
        found.append(_Gather(stay.stage, batch, *behind, divmod(stay.last, length)))
    return found


def _with_gathers(period: tuple[Action, ...], gathers: list[_Gather], number: int) -> tuple[Action, ...]:
    """Return a period, of some number, with its GATHERs and RELEASEs."""
    behind: dict[int, list[Action]] = defaultdict(list)
    for gather in gathers:
        if gather.last[0] == number:
            behind[gather.last[1]].insert(0, gather.action(Op.RELEASE, number))
    for gather in gathers:
        if gather.period == number:
            behind[gather.behind].append(gather.action(Op.GATHER, number))
    return (*behind[-1], *(each for i, action in enumerate(period) for each in (action, *behind[i])))


def _drained(epilogue: tuple[Action, ...], gathers: list[_Gather], number: int, m: int) -> tuple[Action, ...]:
    """Return the epilogue in the place of the period of some number, where nothing else is gathered.

    What its passes read has been gathered before it, or is where it begins.
    """
    there = {g.whole for g in gathers if g.period < number <= g.last[0]}
    read: dict[WholeStage, _Gather] = {}
    for position, action in enumerate(epilogue):
        for p in passes(action):
            if p.op in PASSES and p.reads is not None:
                whole = WholeStage(p.stage, p.reads.versions[0] + number)
                read[whole] = _Gather(whole, p.unit.first // m + number, number, -1, (number, position))
    if not there <= read.keys():
        names = ", ".join(whole.name for whole in sorted(there - read.keys()))
        raise ConfigError(f"stages {names} are still gathered where a span ends, but not read any more")
    ended = {gather.last[1]: gather.action(Op.RELEASE, number) for gather in read.values()}
    begun = [gather.action(Op.GATHER, number) for whole, gather in read.items() if whole not in there]
    after = ((action, *([ended[i]] if i in ended else [])) for i, action in enumerate(epilogue))
    return (*begun, *(each for actions in after for each in actions))
