"""Schedules of candidates, each made once: with their messages, compiled, and with what their ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.errors import ScheduleError
from penstock.plan.candidates.planned_methods import ActivationMemory, PlannedMethod
from penstock.schedule.add_options import extend, extended
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.compiled.collective_events import NotCompiledError, StuckError
from penstock.schedule.compiled.instruction_arrays import CodedSchedule, coded
from penstock.schedule.ir.schedule import WINDOW, Action, Op, Schedule
from penstock.schedule.lowering.lower import Lowering
from penstock.schedule.lowering.send_window_search import SpanEnds, least_window, lower_freely, settled, unlimited
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.proof.proof import Proof
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.held import Combination, HeldKind
from penstock.simulate.memory.memory_simulation import most_held
from penstock.simulate.play import predict
from penstock.timeline import Bubble

_SETTLED = 4  # batches after which a run holds what it always does, where batches overlap

Span = Callable[[list[Costs]], list[Bubble]]

Moment: TypeAlias = Mapping[tuple[int, HeldKind], float]
"""What a rank holds at one moment: how many of each kind, of each of its stages."""


class ScheduleKey(NamedTuple):
    """What tells schedules of candidates apart.

    Attributes:
        method, depth, microbatches: of the schedule.
        parallel: there are several pipelines, which add their gradients.
        sharding: what they divide of the state of stages.
        offloaded: stages whose activations are moved to the memory of the host.
    """

    method: PlannedMethod
    depth: int
    microbatches: int
    parallel: bool
    sharding: str = "none"
    offloaded: tuple[int, ...] = ()

    @property
    def all_offloaded(self) -> ScheduleKey:
        """The same with the activations of all stages moved to the memory of the host."""
        return self._replace(offloaded=tuple(range(self.depth * self.method.chunks)))


class HostCopyCounts(NamedTuple):
    """How many copies of activations a rank makes.

    Attributes:
        of_batch: to the memory of the host and back, in a batch.
        most_away: microbatches that are there at a time.
    """

    of_batch: int
    most_away: int


class KnownSchedules:
    """Schedules that have been made for some candidate.

    Args:
        decides: updates wait for a decision of all stages; those of parallel pipelines always do.
    """

    def __init__(self, decides: bool = True) -> None:
        self._decides = decides
        self._lowered: dict[ScheduleKey, tuple[Lowered, CodedSchedule]] = {}
        self._spans: dict[tuple[ScheduleKey, int], Span] = {}
        self._copies: dict[ScheduleKey, list[HostCopyCounts]] = {}
        self._held: dict[ScheduleKey, dict[ActivationMemory, list[list[Moment]]]] = {}

    def proof(self, key: ScheduleKey, swaps: bool = False) -> Proof:
        """Prove a schedule.

        Args:
            key: which.
            swaps: optimizer states are in the host's memory between updates.

        Raises:
            ScheduleError: it is wrong.
        """
        return extend(self._plain(key), swaps=swaps, **self._added(key))

    def schedule(self, key: ScheduleKey) -> Schedule:
        """Return a schedule, not proven.

        Raises:
            ScheduleError: there is no such schedule.
        """
        return self._made(key)[0].schedule

    def span(self, key: ScheduleKey, batches: int) -> Span:
        """Return what predicts a span of so many batches for several costs, compiled if it can be.

        Raises:
            ScheduleError: there is no such schedule.
        """
        if (key, batches) not in self._spans:
            lowered, code = self._made(key)
            played: Span = partial(predict, lowered, batches=batches)
            compiled = played
            with suppress(NotCompiledError):
                compiled = CompiledSpan(code, batches, transfers=True).bubbles
            self._spans[key, batches] = lambda costs: (played if _any_slow(costs, key.depth) else compiled)(costs)
        return self._spans[key, batches]

    def copies(self, key: ScheduleKey) -> list[HostCopyCounts]:
        """Return how many copies each rank makes if it moves all activations to the memory of the host.

        Raises:
            ScheduleError: there is no such schedule.
        """
        if key not in self._copies:
            schedule = self._made(key.all_offloaded)[0].schedule
            self._copies[key] = [_copies_of(program.period, key.microbatches) for program in schedule.programs]
        return self._copies[key]

    def not_gone(self, key: ScheduleKey, batches: int, costs: Costs) -> dict[int, int]:
        """Return by rank how many more activations are on its device than if copies to the host took no time.

        Raises:
            ScheduleError: there is no such schedule.
        """
        return CompiledSpan(self._made(key)[1], batches, transfers=True).not_gone(costs)

    def moments(self, key: ScheduleKey, activations: ActivationMemory) -> list[list[Moment]]:
        """Return what each rank holds at the moments that count; parallel pipelines are taken to be in step.

        What a rank does with its activations changes nothing of what others hold.

        The optimizer remembers nothing in the first batch, and the last messages of a batch may still be held in the
        next one; where batches overlap, four show all of it. But some methods' ranks drift apart for many more, until
        messages stop them: so as many are counted as the window lets be under way.

        Raises:
            ScheduleError: there is no such schedule.
        """
        known = self._held.setdefault(key, {})
        if activations not in known:
            away = activations is ActivationMemory.OFFLOADED
            lowered = self._made(key.all_offloaded if away else key)[0]
            found = most_held(lowered, 3 if key.method.flushes else _SETTLED, blockwise=not away, on_device=away)
            messages = lowered.window if key.method.drifts else None
            for each in (activations,) if away else (ActivationMemory.KEPT, ActivationMemory.RECOMPUTED):
                held = ([_moment(c, each) for c in found[0, rank]] for rank in range(key.depth))
                known[each] = [_largest(moments, messages) for moments in held]
        return known[activations]

    def _made(self, key: ScheduleKey) -> tuple[Lowered, CodedSchedule]:
        """Return a schedule with its messages, not proven."""
        if key not in self._lowered:
            self._lowered[key] = _lowered(extended(self._plain(key), **self._added(key)), key.method)
        return self._lowered[key]

    def _added(self, key: ScheduleKey) -> dict[str, Any]:
        """Return what is added to what the method makes: arguments of `extended`."""
        decides = self._decides or key.parallel
        return {"decides": decides, "reduces": key.parallel, "sharding": key.sharding, "offloads": key.offloaded}

    @staticmethod
    def _plain(key: ScheduleKey) -> Schedule:
        """Return what the method makes."""
        sizes = key.method.row, key.depth, key.microbatches
        return ScheduleRequest(*sizes, options=key.method.options, sharding="none").schedule


def _copies_of(period: Sequence[Action], microbatches: int) -> HostCopyCounts:
    """Return how many copies a rank makes, given what it does in each batch; what others began count from there on."""
    there = most = made = 0
    for batch in range(_SETTLED):
        made = 0
        for action in period:
            if action.op in (Op.OFFLOAD, Op.FETCH) and action.unit.first + batch * microbatches >= 0:
                there += 1 if action.op is Op.OFFLOAD else -1
                made, most = made + 1, max(most, there)
    return HostCopyCounts(made, most)


_MESSAGES = (HeldKind.OUTPUT, HeldKind.GRADIENT)
_PLAIN: Mapping[HeldKind, HeldKind | None] = MappingProxyType({
    HeldKind.SAVED: HeldKind.GRAPH,  # those of halved backwards are as large
    **dict.fromkeys((HeldKind.FORWARD, HeldKind.FORWARD_HALVED, HeldKind.BACKWARD, HeldKind.BACKWARD_HALVED)),
})  # fmt: skip  # what is held instead, without recompute


def _moment(combination: Combination, activations: ActivationMemory) -> dict[tuple[int, HeldKind], float]:
    """Return how many of each kind are held, of each stage; a message is one of the stage that sends it.

    Args:
        combination: of what is held where blocks are recomputed; or where activations are offloaded, if they are.
        activations: if they are kept, graphs are there instead, from each forward to its backward.
    """
    found: dict[tuple[int, HeldKind], float] = {}
    for what, count in combination:
        kind = _PLAIN.get(what.kind, what.kind) if activations is ActivationMemory.KEPT else what.kind
        if kind is not None:
            found[what.stage, kind] = found.get((what.stage, kind), 0.0) + count
    return found


def _largest(moments: list[dict[tuple[int, HeldKind], float]], messages: int | None) -> list[Moment]:
    """Return the moments that no other one exceeds or equals in all.

    Args:
        moments: of a rank.
        messages: of each kind at all of them, if it sends any; None for as many as there are.
    """
    if messages is not None:
        sent = {what for each in moments for what in each if what[1] in _MESSAGES}
        moments = [{**each, **dict.fromkeys(sent, float(messages))} for each in moments]
    kinds = list(dict.fromkeys(what for each in moments for what in each))
    rows, found = np.array([[each.get(what, 0.0) for what in kinds] for each in moments]), list[Moment]()
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    while len(rows):  # the first one has the largest sum, so no other one exceeds it
        found.append({what: n for what, n in zip(kinds, rows[0].tolist(), strict=True) if n})
        rows = rows[(rows > rows[0]).any(axis=1)]
    return found


def _any_slow(costs: list[Costs], ranks: int) -> bool:
    """Return whether ranks slow each other down at some of these costs."""
    return any(each.slow_down(ranks) for each in costs)


def _likely_window(schedule: Schedule, method: PlannedMethod) -> int:
    """Return a window that is likely to be the least.

    Where a rank runs its forwards stage by stage, messages wait for it from the round before.
    """
    beyond = schedule.microbatches - schedule.ranks
    if method.forwards_first:
        return beyond // 2 + 1
    return beyond if method.full else 2 * WINDOW


def _lowered(schedule: Schedule, method: PlannedMethod) -> tuple[Lowered, CodedSchedule]:
    """Lower a schedule with the window that its proof finds; spans are compiled, which is faster than to play them."""
    lowering, batches = Lowering(schedule), settled(schedule)
    costs = Costs((StageCost(1.0, 1.0, 1.0),) * schedule.num_stages)

    def at(window: int) -> tuple[Lowered, CodedSchedule] | None:
        try:
            lowered = lowering.at(window)
        except ScheduleError:  # messages that are used out of order need more
            return None
        return lowered, coded(lowered)

    def ends(found: tuple[Lowered, CodedSchedule]) -> SpanEnds | None:
        try:
            return CompiledSpan(found[1], batches).ends(costs)
        except StuckError:  # with so few buffers
            return None

    def unhindered(enough: int) -> SpanEnds:
        return CompiledSpan(coded(lowering.at(enough)), batches).ends(costs)

    try:
        return least_window(at, ends, unhindered, unlimited(schedule), partial(_likely_window, schedule, method))
    except NotCompiledError:
        found = lower_freely(schedule)
        return found, coded(found)
