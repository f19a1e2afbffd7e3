"""Schedules of candidates, each made once: with their messages, compiled, and with what their ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.plan.simulated.planned_methods import PlannedMethod
from penstock.plan.simulated.rank_memory import Moment
from penstock.schedule.add_options import extend, extended
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.instruction_arrays import CodedSchedule, coded
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.lowering.lower import Lowering
from penstock.schedule.lowering.send_window_search import SpanEnds, least_window, lower_freely, settled, unlimited
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.proof.proof import Proof
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.held import Combination, HeldKind
from penstock.simulate.memory.in_process_run import most_held
from penstock.simulate.simulate import predict
from penstock.timeline import Bubble

Span = Callable[[list[Costs]], list[Bubble]]


class ScheduleKey(NamedTuple):
    """What tells schedules of candidates apart.

    Attributes:
        method, depth, microbatches: of the schedule.
        parallel: there are several pipelines, which add their gradients.
        sharding: what they divide of the state of stages.
    """

    method: PlannedMethod
    depth: int
    microbatches: int
    parallel: bool
    sharding: str = "none"


class KnownSchedules:
    """Schedules that have been made for some candidate.

    Args:
        decides: updates wait for a decision of all stages; those of parallel pipelines always do.
    """

    def __init__(self, decides: bool = True) -> None:
        self._decides = decides
        self._lowered: dict[ScheduleKey, tuple[Lowered, CodedSchedule]] = {}
        self._spans: dict[tuple[ScheduleKey, int], Span] = {}
        self._held: dict[tuple[ScheduleKey, bool, int], list[list[Moment]]] = {}

    def proof(self, key: ScheduleKey) -> Proof:
        """Prove a schedule.

        Raises:
            ScheduleError: it is wrong.
        """
        return extend(
            self._plain(key), decides=self._decides or key.parallel, reduces=key.parallel, sharding=key.sharding
        )

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

    def moments(self, key: ScheduleKey, recompute: bool, batches: int = 2) -> list[list[Moment]]:
        """Return what each rank holds at the moments that count; parallel pipelines are taken to be in step.

        Two batches show all of it, as in the second the last messages of the first may still be held; where batches
        overlap, four. One is faster, and shows the least that there is.

        Raises:
            ScheduleError: there is no such schedule.
        """
        if (key, recompute, batches) not in self._held:
            found = most_held(self._made(key)[0], batches, blockwise=recompute)
            ranks = key.method.ranks(key.depth)
            own: list[dict[tuple[int, HeldKind], float]] = [{} for _ in range(key.depth)]
            for stage, rank in enumerate(ranks):
                own[rank] |= {(stage, HeldKind.OPTIMIZER): 1.0, (stage, HeldKind.SCRATCH): 1.0}
            self._held[key, recompute, batches] = [
                [_moment(each) | own[rank] for each in found[0, rank]] for rank in range(key.depth)
            ]
        return self._held[key, recompute, batches]

    def _made(self, key: ScheduleKey) -> tuple[Lowered, CodedSchedule]:
        """Return a schedule with its messages, not proven."""
        if key not in self._lowered:
            self._lowered[key] = _lowered(
                extended(
                    self._plain(key), decides=self._decides or key.parallel, reduces=key.parallel, sharding=key.sharding
                )
            )
        return self._lowered[key]

    @staticmethod
    def _plain(key: ScheduleKey) -> Schedule:
        """Return what the method makes."""
        return ScheduleRequest(key.method.row, key.depth, key.microbatches, options=key.method.options).schedule


def _moment(combination: Combination) -> dict[tuple[int, HeldKind], float]:
    """Return how many of each kind are held, of each stage; a message is one of the stage that sends it."""
    found: dict[tuple[int, HeldKind], float] = {}
    for what, count in combination:
        found[what.stage, what.kind] = found.get((what.stage, what.kind), 0.0) + count
    return found


def _any_slow(costs: list[Costs], ranks: int) -> bool:
    """Return whether ranks slow each other down at some of these costs."""
    return any(each.slow_down(ranks) for each in costs)


def _lowered(schedule: Schedule) -> tuple[Lowered, CodedSchedule]:
    """Lower a schedule with the window that its proof finds; spans are compiled, which is faster than to play them."""
    lowering, batches = Lowering(schedule), settled(schedule)
    costs = Costs((StageCost(1.0, 1.0, 1.0),) * schedule.num_stages)

    def at(window: int) -> tuple[Lowered, CodedSchedule] | None:
        try:
            lowered = lowering.at(window)
        except ScheduleError:  # messages that are used out of order need more
            return None
        return lowered, coded(lowered)

    def ends(found: tuple[Lowered, CodedSchedule]) -> SpanEnds:
        return CompiledSpan(found[1], batches).ends(costs)

    def unhindered(enough: int) -> SpanEnds:
        lowered = lowering.at(enough)
        return ends((lowered, coded(lowered)))

    try:
        return least_window(at, ends, unhindered, unlimited(schedule))
    except NotCompiledError:
        found = lower_freely(schedule)
        return found, coded(found)
