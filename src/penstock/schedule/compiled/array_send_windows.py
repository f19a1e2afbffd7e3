"""The window of a schedule of arrays, and whether nobody waits for ever with it.

As `penstock.schedule.lowering.send_window_search` and `penstock.schedule.proof.check` find them by playing actions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from penstock.schedule.compiled.array_lowering import ArrayLowered, ArrayLowering
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.evaluate import EventTimes
from penstock.schedule.compiled.event_graph_builder import graph_of
from penstock.schedule.compiled.instruction_arrays import CodedSchedule
from penstock.schedule.ir.arrays import STEP, ArraySchedule
from penstock.schedule.ir.schedule import Action
from penstock.schedule.lowering.send_window_search import SpanEnds, least_window, unlimited
from penstock.schedule.machine.default_durations import unit_time

_LIMIT = 8
"""Batches beyond twice the transient by which the state must have repeated."""


def oldest_batch(schedule: ArraySchedule) -> int:
    """Return how many batches before its own the oldest is that a period works on."""
    m = schedule.microbatches
    return max(
        (
            -int(np.where(part.op == STEP, part.first, part.first // m).min())
            for part, _ in schedule.arrays
            if len(part)
        ),
        default=0,
    )


def lower_arrays_freely(
    schedule: ArraySchedule,
    duration: Callable[[Action], float] = unit_time,
    latency: float = 0.0,
    spans: Collection[int] = (),
    transfer: float = 0.0,
) -> ArrayLowered:
    """Lower a schedule with the least window, of at least `WINDOW`, that costs no time; arguments as of `lower_freely`.

    Raises:
        NotCompiledError: some ranks wait for ever, or need what nobody gives.
    """
    lowering = ArrayLowering(schedule)
    endless = any(len(program.epilogue) for program in schedule.arrays)
    lengths = sorted({3 + oldest_batch(schedule) if endless else 2, *spans})

    def at(window: int) -> ArrayLowered | None:
        try:
            return lowering.at(window)
        except NotCompiledError:  # too few buffers
            return None

    def ends(lowered: ArrayLowered) -> SpanEnds | None:
        return _ends(lowered.code, duration, latency, transfer, lengths)

    def unhindered(enough: int) -> SpanEnds:
        free = ends(lowering.at(enough))
        if free is None:
            raise NotCompiledError("some ranks wait for ever with any window")
        return free

    return least_window(at, ends, unhindered, unlimited(schedule, lengths[-1]))


def _ends(
    code: CodedSchedule,
    duration: Callable[[Action], float],
    latency: float,
    transfer: float,
    spans: Collection[int],
) -> SpanEnds | None:
    makespans, held_up = list[float](), False
    for batches in spans:
        graph = graph_of(code, batches, transfers=bool(transfer))
        if graph.steps.stuck:
            return None
        durations = np.array([[duration(action)] for action in graph.classes.examples])
        found = EventTimes(graph, durations, np.array([latency]), np.array([transfer])).ends()
        makespans.append(float(found.clocks.max()))
        held_up |= bool(found.held_up[0])
    return SpanEnds(tuple(makespans), held_up)


def nobody_waits_for_ever(lowered: ArrayLowered, transient: int) -> bool:
    """Whether no rank waits for ever in a span of any length; False also where that is not found out here.

    What is under way at a border of batches follows from how far each rank has come, as the play is determined. So once
    all ranks stand as far from the end of a period as they did a period before, everything from there on repeats; up to
    there a span of every length is played to its end. That is the induction of `penstock.schedule.proof.check`.

    Args:
        lowered: the schedule with its messages.
        transient: the first batch in whose period nothing that is used lies before the span.
    """
    if not any(len(program.epilogue) for program in lowered.code.schedule.arrays):  # type: ignore[attr-defined]
        return not graph_of(lowered.code, 1).steps.stuck
    if lowered.window > lowered.schedule.microbatches:  # periods have different events while windows fill
        return False
    before = None
    for t in range(_LIMIT + 2 * transient):
        if graph_of(lowered.code, t + 1).steps.stuck:
            return False
        if t + 1 < max(transient, 1):
            continue
        graph = graph_of(lowered.code, t + 1, drained=False)
        left = (graph.chains[1:] - graph.steps.heads)[: graph.ranks].tolist()
        if left == before and t >= transient:
            return True
        before = left
    return False
