"""Fully sharded state where batches overlap: which version of which stage is whole when.

Passes of two batches read two versions of a stage, so versions of stages have places, not stages. A rank's period is
unrolled, and what becomes of its places in the midst of that is its period. A version that is read in the next period
may be gathered in this one, if it is one of a batch that has begun: then it is read there, or in the epilogue of a span
that ends here. Updates of a batch stand at the end of the next period, so that the sum of its last gradient has time,
and no gather of the new version waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schedule.ir.op_table import PASSES
from penstock.schedule.ir.schedule import Action, Op, Program, Schedule, Stage, WeightRef, passes
from penstock.schedule.transforms.batch_ops import batch_unit
from penstock.schedule.transforms.gather_slots import stays

_SETTLING = 3  # periods in which fewer batches overlap than in later ones
_UNROLLED = 12


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
        period, next_one = (_placed(program.period, gathers, each) for each in (number, number + 1))
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


def _placed(period: tuple[Action, ...], gathers: list[_Gather], number: int) -> tuple[Action, ...]:
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
