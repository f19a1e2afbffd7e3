"""Lowering of a schedule that is arrays: what `penstock.schedule.lowering.lower` makes of it, as arrays again.

The rules are those of `lower` and `receives`, for a chain of stages, each held once: a stage takes activations from the
one before it and gradients from the one behind it. Whatever is not as it should be raises `NotCompiledError`, and
lowering the actions themselves says what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.instruction_arrays import (
    ACT,
    RECEIVE,
    SEND,
    Code,
    CodedSchedule,
    CostClasses,
    Numbers,
    lanes_of,
)
from penstock.schedule.ir.arrays import OPERATIONS, STEP, ArraySchedule, B, F, I, W
from penstock.schedule.ir.schedule import Action, Kind, Payload, Unit
from penstock.schedule.lowering.lower import lower
from penstock.schedule.lowering.receives import posts_out_of_order
from penstock.schedule.machine.instructions import LaneKey, Lowered, LoweredProgram, Route


class ArrayLowered(Lowered):
    """A lowered schedule as arrays, whose instructions are made when somebody looks at them.

    `dataclasses.replace` makes a plain one of it.

    Attributes:
        code: the arrays.
    """

    code: CodedSchedule

    def __new__(cls, *fields: Any, **named: Any) -> Lowered:  # type: ignore[misc]
        """Return a plain one where the fields of one are given."""
        return Lowered(*fields, **named) if fields or named else object.__new__(cls)

    @cached_property
    def programs(self) -> tuple[LoweredProgram, ...]:
        """The instructions of every rank; made at the first look."""
        return lower(self.schedule, self.__dict__["lookahead"], self.window).programs

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


class _Use(NamedTuple):
    """The messages of a lane in one part of its target's program, in the order in which they are sent."""

    route: Numbers
    lag: Numbers
    position: Numbers
    first: Numbers


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

    Raises:
        NotCompiledError: a pass needs something that no pass of this or an earlier period gives.
    """

    def __init__(self, schedule: ArraySchedule) -> None:
        self.schedule, self._m = schedule, schedule.microbatches
        ranks = range(schedule.ranks)
        self._found: dict[tuple[int, str], _StagePasses] = {}
        for rank in ranks:
            self._find_passes(rank)
        self.routes = list(self._routes())
        self.lanes = tuple(sorted({route.lane for route in self.routes}))
        self._route_of = {(r.payload, r.target.index): i for i, r in enumerate(self.routes)}
        lengths = [[len(part) for part in program] for program in schedule.arrays]
        self._sends = [[np.full(n, -1) for n in each] for each in lengths]  # the route of what a pass sends
        self._takes = [[np.full(n, -1) for n in each] for each in lengths]  # and of what it takes
        found: dict[tuple[LaneKey, int], list[tuple[Numbers, _Use]]] = {}
        for part in (0, 1):
            for stage in schedule.stages:
                for lane, order, use in self._link_stage(stage.index, part):
                    found.setdefault((lane, part), []).append((order, use))
        self._uses = {key: _in_order(each) for key, each in found.items()}
        self._classes, self._class_of = self._cost_classes()

    # --- who gives what ---------------------------------------------------------------------------------------------

    def _find_passes(self, rank: int) -> None:
        arrays = self.schedule.arrays[rank]
        for stage in self.schedule.on_rank(rank):
            for what, ops in (("F", (F,)), ("G", (B, I)), ("W", (W,))):
                positions = tuple(
                    np.flatnonzero((part.stage == stage.index) & np.isin(part.op, ops)) for part in arrays
                )
                firsts = tuple(part.first[places] for part, places in zip(arrays, positions, strict=True))
                self._found[stage.index, what] = _StagePasses(rank, positions, firsts)  # type: ignore[arg-type]

    def _routes(self) -> Iterator[Route]:
        """Yield the routes in the order in which the programs, rank by rank, first take from them."""
        stages = self.schedule.stages
        for rank in range(self.schedule.ranks):
            found = []
            for stage in self.schedule.on_rank(rank):
                for what, other, payload in (("F", -1, Payload.ACTIVATION), ("G", 1, Payload.GRADIENT)):
                    passes, giver = self._found[stage.index, what], stage.index + other
                    if 0 <= giver < len(stages) and stages[giver].rank != rank and len(passes.positions[0]):
                        route = Route(payload, stages[giver], stage, 1, None)
                        found.append((int(passes.positions[0][0]), route))
            yield from (route for _, route in sorted(found, key=lambda each: each[0]))

    def _link_stage(self, stage: int, part: int) -> Iterator[tuple[LaneKey, Numbers, _Use]]:
        """Check what the passes of a stage take of their own rank; yield what they take of others, and its order."""
        last = len(self.schedule.stages) - 1
        wanted = [("G", "F", stage), ("W", "G", stage)]
        wanted += [("F", "F", stage - 1)] if stage else []
        wanted += [("G", "G", stage + 1)] if stage < last else []
        for what, given, other in wanted:
            taker, giver = self._found[stage, what], self._found[other, given]
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
            self._takes[taker.rank][part][link.position] = route
            for source in (0, 1):
                self._sends[giver.rank][source][link.source[link.part == source]] = route
            order = link.source
            if part:
                order = order + (link.part - link.lag) * len(self.schedule.arrays[giver.rank].period)
            use = _Use(np.full(len(order), route), link.lag, link.position, link.first)
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

    # --- the programs with their messages ---------------------------------------------------------------------------

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

    def at(self, window: int, lookahead: int | None = None) -> ArrayLowered:
        """Place the RECVs; arguments as of `penstock.schedule.lowering.lower.Lowering.at`.

        Raises:
            NotCompiledError: messages on one lane are consumed in an order that needs more than `window` buffers.
        """
        ahead = window if lookahead is None else lookahead
        parts = ([self._code(rank, part, window, ahead) for part in (0, 1)] for rank in range(self.schedule.ranks))
        programs = [(period, epilogue, None) for period, epilogue in parts]
        lane_of_route = lanes_of(self.routes, self.lanes)
        lowered = object.__new__(ArrayLowered)
        code = CodedSchedule(self.schedule, self._classes, programs, self.lanes, lane_of_route, window)
        fields = {"schedule": self.schedule, "routes": tuple(self.routes), "window": window, "lookahead": lookahead}
        lowered.__dict__.update(fields, code=code)
        return lowered

    def _code(self, rank: int, part: int, window: int, lookahead: int) -> Code:
        """Merge the RECVs before each action and the SEND behind it into a part of a rank's program."""
        actions = self.schedule.arrays[rank][part]
        lanes = [lane for lane in self.lanes if lane.target == rank and (lane, part) in self._uses]
        placed = [self._placed(lane, part, window, lookahead) for lane in lanes]
        places, routes, firsts, early = (
            np.concatenate([each[i] for each in placed]) if placed else np.empty(0, dtype=np.int64) for i in range(4)
        )
        order = np.argsort(places, kind="stable")
        places, routes, firsts, early = places[order], routes[order], firsts[order], early[order].astype(bool)
        sends, count = self._sends[rank][part], len(actions)
        sending = np.flatnonzero(sends >= 0)
        before = np.cumsum(np.bincount(places, minlength=count)) if count else np.empty(0, dtype=np.int64)
        sent = np.cumsum(sends >= 0)
        acts = np.arange(count) + before + sent - (sends >= 0)
        receives = np.arange(len(places)) + places + (sent[places] - (sends[places] >= 0))
        total = count + len(places) + len(sending)
        kind, what = np.full(total, ACT, dtype=np.int8), np.empty(total, dtype=np.int32)
        first, ahead, on_batch = (
            np.empty(total, dtype=np.int64),
            np.zeros(total, dtype=bool),
            np.zeros(total, dtype=bool),
        )
        kind[receives], what[receives], first[receives], ahead[receives] = RECEIVE, routes, firsts, early
        what[acts], first[acts] = self._class_of[actions.op, actions.stage], actions.first
        on_batch[acts] = actions.op == STEP
        behind = acts[sending] + 1
        kind[behind], what[behind], first[behind] = SEND, sends[sending], actions.first[sending]
        takes = self._takes[rank][part]
        taking = np.flatnonzero(takes >= 0)
        needs = np.stack([acts[taking], takes[taking], actions.first[taking]], axis=1)
        return Code(kind, what, first, on_batch, ahead, needs, np.empty((0, 3), int), np.empty((0, 5), int))

    def _placed(
        self, lane: LaneKey, part: int, window: int, lookahead: int
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return the RECVs of a lane: position of the action behind each, route, microbatch, whether it is ahead.

        As `penstock.schedule.lowering.receives.LaneReceives.placed`; all actions count here.
        """
        use = self._uses[lane, part]
        if part:
            posts = _posts(use.position, window, lookahead)
            return np.maximum(posts, 0), use.route, use.first, np.zeros(len(posts), dtype=bool)
        period, count = self.schedule.arrays[lane.target].period, len(use.position)
        length, before = len(period), -(-window // count)  # enough earlier periods to see the steady state
        once = use.lag * length + use.position
        if (np.diff(once) > 0).all() and once[-1] < once[0] + length:  # used in the order sent
            freed = before * count + np.arange(count) - window
            steady = np.maximum(once + before * length - lookahead, once[freed % count] + (freed // count) * length + 1)
        else:
            positions = (once + length * np.arange(before + 2)[:, None]).ravel()
            steady = _posts(positions, window, lookahead)[before * count : (before + 1) * count]
        relative = steady - (before + use.lag) * length  # to the start of the consumer's period
        own = np.flatnonzero((period.op == F) & (period.first >= 0))
        early = np.maximum(relative + length, (own[0] if len(own) else length) + 1)
        ahead = (relative < 0) & (early < length)
        place = np.where(ahead, early, np.maximum(relative, 0))
        order = np.lexsort((np.arange(count), ahead - use.lag, place))
        first = use.first + self._m * ahead
        return place[order], use.route[order], first[order], ahead[order]


def _in_order(found: list[tuple[Numbers, _Use]]) -> _Use:
    """Put the messages of a lane into the order in which they are sent."""
    orders = np.concatenate([order for order, _ in found])
    columns = [np.concatenate(column) for column in zip(*(use for _, use in found), strict=True)]
    return _Use(*(column[np.lexsort((columns[0], orders))] for column in columns))


def _posts(positions: Numbers, window: int, lookahead: int) -> Numbers:
    if (np.diff(positions) > 0).all():  # used in the order sent
        posts = positions - lookahead
        posts[window:] = np.maximum(posts[window:], positions[: max(len(posts) - window, 0)] + 1)
        return posts
    found = posts_out_of_order(positions.tolist(), window, lookahead)
    if found is None:
        raise NotCompiledError("messages are used in an order that needs more buffers")
    return np.array(found)
