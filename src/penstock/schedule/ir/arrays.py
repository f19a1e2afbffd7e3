"""Programs as arrays: large orders and schedules of few kinds of actions, without an object for each.

Passes of one microbatch and STEPs can be held this way. The actions themselves are made when somebody looks at them
(`programs`); building, proving and simulating such a schedule does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.gc_pause import no_collection
from penstock.schedule.ir.limits import check_actions
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.schedule import Action, Kind, Op, Program, Schedule, Stage, Unit, WeightRef, chain

Numbers = NDArray[np.signedinteger[Any]]

OPERATIONS = (Op.F, Op.B, Op.I, Op.W, Op.R, Op.STEP)
"""The operations that arrays hold; their places here are their numbers."""
F, B, I, W, R, STEP = range(len(OPERATIONS))  # noqa: E741
BACKWARDS = (B, I, W)
NO_VERSION = int(np.iinfo(np.int32).min)
"""In place of the version that an action reads, where it reads none."""


@dataclass(frozen=True, eq=False)
class ActionArrays:
    """Actions of one rank, in their order.

    Attributes:
        op: places in `OPERATIONS`.
        stage: places of the stages in the order or schedule.
        first: the microbatch of a pass, the batch of a STEP.
        version: that is read, or `NO_VERSION`.
    """

    op: Numbers
    stage: Numbers
    first: Numbers
    version: Numbers

    def __len__(self) -> int:
        return len(self.op)

    @classmethod
    def of(cls, op: Any, stage: Any, first: Any, version: Any = NO_VERSION) -> ActionArrays:
        """Return actions of which each is given by an array, or by one number for all."""
        shape = np.broadcast(op, stage, first, version).shape
        columns = (np.broadcast_to(np.asarray(each, dtype=np.int32), shape) for each in (op, stage, first, version))
        return cls(*(column.ravel() for column in columns))

    @classmethod
    def joined(cls, parts: Sequence[ActionArrays]) -> ActionArrays:
        """Return the actions of all parts, one part behind the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def __getitem__(self, places: Any) -> ActionArrays:
        """Return the actions at some places."""
        return ActionArrays(self.op[places], self.stage[places], self.first[places], self.version[places])

    def reading(self, version: Numbers) -> ActionArrays:
        """Return the same with the versions that they read."""
        return ActionArrays(self.op, self.stage, self.first, version)

    def actions(self, stages: Sequence[Stage]) -> tuple[Action, ...]:
        """Return them as actions, given the stages of the order or schedule."""
        reads = {int(v): WeightRef((int(v),)) if v != NO_VERSION else None for v in np.unique(self.version)}
        columns = (self.op.tolist(), self.stage.tolist(), self.first.tolist(), self.version.tolist())
        kinds = [Kind.BATCH if op is Op.STEP else Kind.TRAIN for op in OPERATIONS]
        return tuple(
            [
                Action(OPERATIONS[op], stages[stage], Unit(first, 1, None, kinds[op]), reads[version])
                for op, stage, first, version in zip(*columns, strict=True)
            ]
        )


NOTHING = ActionArrays.of(*(np.empty(0, dtype=np.int32),) * 4)
"""No action."""


class ProgramArrays(NamedTuple):
    """What one rank runs: as `penstock.schedule.ir.schedule.Program`."""

    period: ActionArrays
    epilogue: ActionArrays = NOTHING


@no_collection
def _programs(arrays: Sequence[ProgramArrays], stages: Sequence[Stage]) -> tuple[Program, ...]:
    return tuple([Program(*(part.actions(stages) for part in program)) for program in arrays])


class ArrayOrder(Order):
    """An order whose programs are arrays. `dataclasses.replace` makes a plain one of it."""

    arrays: tuple[ProgramArrays, ...]

    def __new__(cls, *fields: Any, **named: Any) -> Order:  # type: ignore[misc]
        """Return a plain order where the fields of one are given."""
        return Order(*fields, **named) if fields or named else object.__new__(cls)

    @classmethod
    def of(cls, arrays: Sequence[ProgramArrays], stages: tuple[Stage, ...]) -> ArrayOrder:
        """Return the order of a chain of stages, given the program of every rank."""
        return _filled(cls, arrays=tuple(arrays), stages=stages, edges=chain(1 + max(n.index for n in stages)))

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """What each rank runs; made at the first look."""
        return _programs(self.arrays, self.stages)

    @property
    def endless(self) -> bool:
        """True if backwards of a batch run in the period of a later one, so that batches overlap."""
        return any(len(program.epilogue) for program in self.arrays)


class ArraySchedule(Schedule):
    """A schedule whose programs are arrays: a chain of stages, each held once.

    `dataclasses.replace` makes a plain one of it.
    """

    arrays: tuple[ProgramArrays, ...]

    def __new__(cls, *fields: Any, **named: Any) -> Schedule:  # type: ignore[misc]
        """Return a plain schedule where the fields of one are given."""
        return Schedule(*fields, **named) if fields or named else object.__new__(cls)

    @classmethod
    def of(cls, order: ArrayOrder, arrays: Sequence[ProgramArrays], **fields: Any) -> ArraySchedule:
        """Return a schedule of an order, given the program of every rank, with updates and versions."""
        return _filled(cls, arrays=tuple(arrays), stages=order.stages, edges=order.edges, **fields)

    def with_window(self, window: int) -> ArraySchedule:
        """Return the same with another window."""
        return _filled(ArraySchedule, **{**self.__dict__, "window": window})

    def with_arrays(self, arrays: Sequence[ProgramArrays]) -> ArraySchedule:
        """Return the same with other programs."""
        names = [name for name in Schedule.__dataclass_fields__ if name != "programs"]
        return _filled(ArraySchedule, arrays=tuple(arrays), **{name: getattr(self, name) for name in names})

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """What each rank runs; made at the first look.

        Raises:
            ConfigError: there are too many actions for that.
        """
        check_actions(self.name, self.ranks, self.microbatches)
        return _programs(self.arrays, self.stages)

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.arrays)

    @cached_property
    def operations(self) -> frozenset[Op]:
        """The operations of all periods."""
        found = {op for program in self.arrays for op in np.unique(program.period.op).tolist()}
        return frozenset(OPERATIONS[op] for op in found)

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """The stages whose forward is recomputed before the backward."""
        places = [program.period.stage[program.period.op == R] for program in self.arrays]
        return frozenset(self.stages[place].index for place in np.unique(np.concatenate(places)).tolist())

    @cached_property
    def first_trained(self) -> int:
        """The first stage that is updated; 0 if none is."""
        updated = [program.period.stage[program.period.op == STEP] for program in self.arrays]
        return min((self.stages[place].index for place in np.concatenate(updated).tolist()), default=0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a plain schedule be pickled or copied in place of this one."""
        return Schedule, _fields(self)

    def __eq__(self, other: object) -> bool:
        """Compare with another schedule, however that holds its programs."""
        return isinstance(other, Schedule) and _fields(self) == _fields(other)

    def __hash__(self) -> int:
        """Return the hash of a plain schedule with the same programs."""
        return hash(_fields(self))


_Made = TypeVar("_Made", ArrayOrder, ArraySchedule)


def _filled(cls: type[_Made], **fields: Any) -> _Made:
    found = object.__new__(cls)
    constant = {"slices": 1, "deciding": ()}  # what is none where there are no others
    found.__dict__.update({**constant, **fields})
    return found


def _fields(schedule: Schedule) -> tuple[Any, ...]:
    return tuple([getattr(schedule, name) for name in Schedule.__dataclass_fields__])
