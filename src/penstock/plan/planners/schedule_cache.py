"""Schedules of candidates, each made once: with their messages, compiled, and with what their ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from penstock.plan.planners.block_chain import by_kind
from penstock.schedule.add_options import extend, extended
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.instruction_arrays import CodedSchedule, coded
from penstock.schedule.ir.schedule import WINDOW, Schedule
from penstock.schedule.lowering.lower import Lowering
from penstock.schedule.lowering.send_window_search import lower_freely, settled
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.proof.proof import Proof
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.memory.held import HeldKind
from penstock.simulate.memory.in_process_run import most_held
from penstock.simulate.simulate import predict
from penstock.timeline import Bubble

Span = Callable[[list[Costs]], list[Bubble]]
Moments = list[list[dict[HeldKind, float]]]


class ScheduleKey(NamedTuple):
    """What tells schedules of candidates apart.

    Attributes:
        method, depth, microbatches: of the schedule.
        parallel: there are several pipelines, which add their gradients.
    """

    method: str
    depth: int
    microbatches: int
    parallel: bool


class KnownSchedules:
    """Schedules that have been made for some candidate.

    Args:
        decides: updates wait for a decision of all stages; those of parallel pipelines always do.
    """

    def __init__(self, decides: bool = True) -> None:
        self._decides = decides
        self._lowered: dict[ScheduleKey, tuple[Lowered, CodedSchedule]] = {}
        self._spans: dict[tuple[ScheduleKey, int], Span] = {}
        self._held: dict[tuple[ScheduleKey, bool, int], Moments] = {}

    def proof(self, key: ScheduleKey) -> Proof:
        """Prove a schedule.

        Raises:
            ScheduleError: it is wrong.
        """
        plain = ScheduleRequest(key.method, key.depth, key.microbatches).schedule
        return extend(plain, decides=self._decides or key.parallel, reduces=key.parallel)

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

    def moments(self, key: ScheduleKey, recompute: bool, batches: int = 2) -> Moments:
        """Return what each rank holds at the moments that count; parallel pipelines are taken to be in step.

        Two batches show all of it, as in the second the last messages of the first may still be held. One is faster,
        and shows the least that there is.

        Raises:
            ScheduleError: there is no such schedule.
        """
        if (key, recompute, batches) not in self._held:
            found = most_held(self._made(key)[0], batches, blockwise=recompute)
            own = {HeldKind.OPTIMIZER: 1.0, HeldKind.SCRATCH: 1.0}
            self._held[key, recompute, batches] = [
                [by_kind(each) | own for each in found[0, rank]] for rank in range(key.depth)
            ]
        return self._held[key, recompute, batches]

    def _made(self, key: ScheduleKey) -> tuple[Lowered, CodedSchedule]:
        """Return a schedule with its messages, not proven."""
        if key not in self._lowered:
            plain = ScheduleRequest(key.method, key.depth, key.microbatches).schedule
            self._lowered[key] = _lowered(extended(plain, decides=self._decides or key.parallel, reduces=key.parallel))
        return self._lowered[key]


def _any_slow(costs: list[Costs], ranks: int) -> bool:
    """Return whether ranks slow each other down at some of these costs."""
    return any(each.slow_down(ranks) for each in costs)


def _lowered(schedule: Schedule) -> tuple[Lowered, CodedSchedule]:
    """Lower a schedule with the window that its proof finds; compiled, since that is most often the least."""
    narrow = Lowering(schedule).at(WINDOW)
    code, cost = coded(narrow), StageCost(1.0, 1.0, 1.0)
    try:
        times = CompiledSpan(code, settled(schedule)).times([Costs((cost,) * schedule.num_stages)])
        if not times.held_up[0]:
            return narrow, code
    except NotCompiledError:
        pass
    found = lower_freely(schedule, narrow=narrow)
    return found, coded(found)
