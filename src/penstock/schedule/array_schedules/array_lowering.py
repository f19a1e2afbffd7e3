"""Lowering of a schedule that is arrays: what `penstock.schedule.lowering.lower` makes of it, as arrays again.

The rules are those of `lower` and `receives`, for a chain of stages, each held once: a stage takes activations from the
one before it and gradients from the one behind it. Whatever is not as it should be raises `NotCompiledError`, and
lowering the actions themselves says what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.schedule.array_schedules.array_instructions import PartActions, codes
from penstock.schedule.array_schedules.array_receives import LaneUse, PlacedReceives, in_epilogue, in_period
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.instruction_arrays import CodedSchedule, CostClasses, Numbers
from penstock.schedule.ir.arrays import OPERATIONS, STEP, ArraySchedule, B, F, I, W
from penstock.schedule.ir.schedule import Action, Kind, Payload, Unit
from penstock.schedule.lowering.lower import lower
from penstock.schedule.machine.instructions import LaneKey, Lowered, LoweredProgram, Route


class ArrayLowered(Lowered):
    """A lowered schedule as arrays, whose instructions are made when somebody looks at them.

    `dataclasses.replace` makes a plain one of it.

    Attributes:
        lowering: its passes, and who sends to whom.
        receives: its RECVs by lane, in the period and in the epilogue.
    """

    lowering: ArrayLowering
    receives: tuple[Mapping[LaneKey, PlacedReceives], Mapping[LaneKey, PlacedReceives]]

    def __new__(cls, *fields: Any, **named: Any) -> Lowered:  # type: ignore[misc]
        """Return a plain one where the fields of one are given."""
        return Lowered(*fields, **named) if fields or named else object.__new__(cls)

    @cached_property
    def programs(self) -> tuple[LoweredProgram, ...]:
        """The instructions of every rank; made at the first look."""
        return lower(self.schedule, self.__dict__["lookahead"], self.window).programs

    @cached_property
    def code(self) -> CodedSchedule:
        """The same as instructions in arrays; made at the first look."""
        its = self.lowering
        programs = codes(its.parts, self.receives, its.lanes)
        return CodedSchedule(self.schedule, its.classes, programs, its.lanes, its.lane_of_route, self.window)

    def __eq__(self, other: object) -> bool:
        """Compare with another lowered schedule, however that holds its programs."""
        names = Lowered.__dataclass_fields__
        return isinstance(other, Lowered) and all(getattr(self, n) == getattr(other, n) for n in names)

    __hash__ = None  # type: ignore[assignment]


class _Link(NamedTuple):
    """Who gives what some passes of one rank take, a row for each of these.

    Attributes:
        position, first: of the pass that takes it.
        source, part, lag: position and part of the pass that gives it, and how many periods earlier that stands.
    """

    position: Numbers
    first: Numbers
    source: Numbers
    part: Numbers
    lag: Numbers


@dataclass(frozen=True)
class _StagePasses:
    """The passes of a stage that give or take one kind of thing."""

    rank: int
    positions: tuple[Numbers, Numbers]
    firsts: tuple[Numbers, Numbers]


class ArrayLowering:
    """The messages of a schedule of arrays, found once; `at` places them for a window.

    Args:
        schedule: whose.

    Attributes:
        routes, lanes: of the messages.
        classes: of the actions.
        parts: the actions of the periods and of the epilogues.
        uses: the messages of each lane, in the periods and in the epilogues of their targets.

    Raises:
        NotCompiledError: a pass needs something that no pass of this or an earlier period gives.
    """

    def __init__(self, schedule: ArraySchedule) -> None:
        self.schedule, self._m = schedule, schedule.microbatches
        found: dict[tuple[int, str], _StagePasses] = {}
        for rank in range(schedule.ranks):
            found.update(self._passes(rank))
        self.routes = list(self._routes(found))
        self.lanes = tuple(sorted({route.lane for route in self.routes}))
        self._route_of = {(r.payload, r.target.index): i for i, r in enumerate(self.routes)}
        self.classes, class_of = self._cost_classes()
        self.parts = self._part(0, class_of), self._part(1, class_of)
        uses: dict[tuple[LaneKey, int], list[tuple[Numbers, LaneUse]]] = {}
        for part in (0, 1):
            for stage in schedule.stages:
                for lane, order, use in self._link_stage(found, stage.index, part):
                    uses.setdefault((lane, part), []).append((order, use))
        self.uses: tuple[dict[LaneKey, LaneUse], dict[LaneKey, LaneUse]] = {}, {}
        for lane in self.lanes:
            for part in (0, 1):
                if (lane, part) in uses:
                    self.uses[part][lane] = _in_order(uses.pop((lane, part)))

    # --- who gives what ---------------------------------------------------------------------------------------------

    def _passes(self, rank: int) -> Iterator[tuple[tuple[int, str], _StagePasses]]:
        arrays = self.schedule.arrays[rank]
        for stage in self.schedule.on_rank(rank):
            here = [np.flatnonzero(part.stage == stage.index) for part in arrays]
            op = [part.op[places] for part, places in zip(arrays, here, strict=True)]
            for what, ops in (("F", (F,)), ("G", (B, I)), ("W", (W,))):
                positions, firsts = list[Numbers](), list[Numbers]()
                for part, places, each in zip(arrays, here, op, strict=True):
                    chosen = places[(each == ops[0]) | (each == ops[-1])]
                    positions.append(chosen.astype(np.int32))
                    firsts.append(part.first[chosen].astype(np.int32))
                passes = _StagePasses(rank, (positions[0], positions[1]), (firsts[0], firsts[1]))
                yield (stage.index, what), passes

    def _routes(self, passes: Mapping[tuple[int, str], _StagePasses]) -> Iterator[Route]:
        """Yield the routes in the order in which the programs, rank by rank, first take from them."""
        stages = self.schedule.stages
        for rank in range(self.schedule.ranks):
            found = []
            for stage in self.schedule.on_rank(rank):
                for what, other, payload in (("F", -1, Payload.ACTIVATION), ("G", 1, Payload.GRADIENT)):
                    own, giver = passes[stage.index, what], stage.index + other
                    if 0 <= giver < len(stages) and stages[giver].rank != rank and len(own.positions[0]):
                        route = Route(payload, stages[giver], stage, 1, None)
                        found.append((int(own.positions[0][0]), route))
            yield from (route for _, route in sorted(found, key=lambda each: each[0]))

    def _link_stage(
        self, passes: Mapping[tuple[int, str], _StagePasses], stage: int, part: int
    ) -> Iterator[tuple[LaneKey, Numbers, LaneUse]]:
        """Check what the passes of a stage take of their own rank; yield what they take of others, and its order."""
        last = len(self.schedule.stages) - 1
        wanted = [("G", "F", stage), ("W", "G", stage)]
        wanted += [("F", "F", stage - 1)] if stage else []
        wanted += [("G", "G", stage + 1)] if stage < last else []
        for what, given, other in wanted:
            taker, giver = passes[stage, what], passes[other, given]
            link = self._link(taker, giver, part)
            if taker.rank == giver.rank:
                late = (link.lag == 0) & (link.part == part) & (link.source >= link.position)
                if late.any():
                    raise NotCompiledError("a pass stands before another that it needs")
                continue
            if not len(link.position):
                continue
            payload = Payload.ACTIVATION if what == "F" else Payload.GRADIENT
            route = self._route_of[payload, stage]
            takes = self.parts[part]
            takes.takes[takes.starts[taker.rank] + link.position] = route
            for source, sends in enumerate(self.parts):
                sends.sends[sends.starts[giver.rank] + link.source[link.part == source]] = route
            order = link.source
            if part:
                order = order + (link.part - link.lag) * len(self.schedule.arrays[giver.rank].period)
            use = LaneUse(np.full(len(order), route), link.lag, link.position, link.first)
            yield self.routes[route].lane, order, use

    def _link(self, taker: _StagePasses, giver: _StagePasses, part: int) -> _Link:
        """Find the givers, in the epilogue or in this or an earlier period."""
        m, position, first = self._m, taker.positions[part], taker.firsts[part]
        places, batches = np.full(m, -1), np.zeros(m, dtype=np.int64)
        places[giver.firsts[0] % m], batches[giver.firsts[0] % m] = giver.positions[0], giver.firsts[0] // m
        source, lag = places[first % m], batches[first % m] - first // m
        parts, valid = np.zeros_like(source), (source >= 0) & (lag >= part)
        if part and len(giver.firsts[1]):
            order = np.argsort(giver.firsts[1])
            sought = np.minimum(np.searchsorted(giver.firsts[1], first, sorter=order), len(order) - 1)
            final = giver.firsts[1][order[sought]] == first
            source = np.where(final, giver.positions[1][order[sought]], source)
            parts, lag, valid = final.astype(np.int64), np.where(final, 0, lag), valid | final
        if not valid.all():
            raise NotCompiledError("a pass needs something that nobody gives")
        return _Link(position, first, source, parts, lag)

    def _cost_classes(self) -> tuple[CostClasses, Numbers]:
        """Return the classes of all actions, and the number of each, by operation and stage."""
        classes, stages = CostClasses(), self.schedule.stages
        numbers = np.full((len(OPERATIONS), len(stages)), -1)
        for program in self.schedule.arrays:
            for key in np.unique(program.period.op * len(stages) + program.period.stage).tolist():
                op, stage = divmod(key, len(stages))
                unit = Unit(0, kind=Kind.BATCH if op == STEP else Kind.TRAIN)
                numbers[op, stage] = classes.of(Action(OPERATIONS[op], stages[stage], unit))
        return classes, numbers

    def _part(self, part: int, class_of: Numbers) -> PartActions:
        """Return the actions of all ranks, of which is not known yet what they take and send."""
        each = [program[part] for program in self.schedule.arrays]
        starts = np.cumsum([0, *map(len, each)])
        small = np.int16 if len(self.classes.examples) < 1 << 15 else np.int32
        found = PartActions(
            starts,
            *(np.empty(starts[-1], dtype=kind) for kind in (small, np.int32, bool)),
            *(np.full(starts[-1], -1, dtype=np.int32) for _ in range(2)),
        )
        for actions, start, end in zip(each, starts[:-1], starts[1:], strict=True):
            found.cls[start:end] = class_of[actions.op, actions.stage]
            found.first[start:end] = actions.first
            found.steps[start:end] = actions.op == STEP
        return found

    # --- the messages -----------------------------------------------------------------------------------------------

    @cached_property
    def lane_of_route(self) -> Numbers:
        """The index of the lane of every route."""
        index = {lane: i for i, lane in enumerate(self.lanes)}
        return np.array([index[route.lane] for route in self.routes], dtype=np.int64)

    @cached_property
    def lanes_of_classes(self) -> tuple[Numbers, Numbers]:
        """The lanes on which actions of each class take and send their message; -1 where they have none."""
        found = np.full((2, len(self.classes.examples)), -1)
        for part in self.parts:
            for lanes, routes in zip(found, (part.takes, part.sends), strict=True):
                there = routes >= 0
                lanes[part.cls[there]] = self.lane_of_route[routes[there]]
        return found[0], found[1]

    @cached_property
    def sending(self) -> tuple[Numbers, Numbers]:
        """The actions of periods and of epilogues that send: those of a lane behind those of the one before."""
        found = []
        for part in self.parts:
            places = np.flatnonzero(part.sends >= 0).astype(np.int32)
            lanes = self.lane_of_route[part.sends[places]].astype(np.uint16 if len(self.lanes) < 1 << 16 else np.int32)
            found.append(places[np.argsort(lanes, kind="stable")])
        return found[0], found[1]

    def at(self, window: int, lookahead: int | None = None) -> ArrayLowered:
        """Place the RECVs; arguments as of `penstock.schedule.lowering.lower.Lowering.at`.

        Raises:
            NotCompiledError: messages on one lane are consumed in an order that needs more than `window` buffers.
        """
        ahead, m, arrays = window if lookahead is None else lookahead, self._m, self.schedule.arrays
        periods = {
            lane: in_period(use, arrays[lane.target].period, window, ahead, m) for lane, use in self.uses[0].items()
        }
        epilogues = {lane: in_epilogue(use, window, ahead) for lane, use in self.uses[1].items()}
        lowered = object.__new__(ArrayLowered)
        fields = {"schedule": self.schedule, "routes": tuple(self.routes), "window": window, "lookahead": lookahead}
        lowered.__dict__.update(fields, lowering=self, receives=(periods, epilogues))
        return lowered


def _in_order(found: list[tuple[Numbers, LaneUse]]) -> LaneUse:
    """Put the messages of a lane into the order in which they are sent."""
    orders = np.concatenate([order for order, _ in found])
    columns = [np.concatenate(column) for column in zip(*(use for _, use in found), strict=True)]
    places = np.lexsort((columns[0], orders))
    return LaneUse(*(column[places].astype(np.int32) for column in columns))
