"""The window of a schedule of arrays, and whether nobody waits for ever with it.

As `penstock.schedule.lowering.send_window_search` and `penstock.schedule.proof.check` find them by playing actions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain

import numpy as np

from penstock.schedule.array_schedules.array_lowering import ArrayLowered, ArrayLowering
from penstock.schedule.array_schedules.array_play import ArrayPlay, whole_span
from penstock.schedule.array_schedules.array_span import ArraySpan
from penstock.schedule.compiled.collective_events import NotCompiledError
from penstock.schedule.compiled.evaluate import EventTimes, Times, lane_latencies
from penstock.schedule.compiled.event_graph_builder import graph_of
from penstock.schedule.ir.arrays import STEP, ArraySchedule
from penstock.schedule.ir.schedule import WINDOW, Action
from penstock.schedule.lowering.send_window_search import SpanEnds, least_window, unlimited
from penstock.schedule.machine.default_durations import unit_time
from penstock.schedule.machine.message_lanes import Latency

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
    lowering: ArrayLowering,
    duration: Callable[[Action], float] = unit_time,
    latency: Latency = 0.0,
    spans: Collection[int] = (),
    transfer: float = 0.0,
) -> ArrayLowered:
    """Lower a schedule with the least window, of at least `WINDOW`, that costs no time; arguments as of `lower_freely`.

    Raises:
        NotCompiledError: some ranks wait for ever, or need what nobody gives.
    """
    schedule = lowering.schedule
    endless = any(len(program.epilogue) for program in schedule.arrays)
    lengths = sorted({3 + oldest_batch(schedule) if endless else 2, *spans})
    durations = np.array([[duration(action)] for action in lowering.classes.examples])
    hop = lane_latencies(lowering.lanes, [latency]), np.array([transfer])
    guess = WINDOW

    def at(window: int) -> ArrayLowered | None:
        try:
            return lowering.at(window)
        except NotCompiledError:  # too few buffers
            return None

    def ends(lowered: ArrayLowered) -> SpanEnds | None:
        return _ends(_played(lowered, durations, *hop, batches) for batches in lengths)

    def unhindered(enough: int) -> SpanEnds:
        nonlocal guess
        free = lowering.at(enough)
        play = _played(free, durations, *hop, lengths[0])
        guess = _room_taken(play) if isinstance(play, ArrayPlay) else WINDOW
        others = (_played(free, durations, *hop, batches) for batches in lengths[1:])
        found = _ends(chain([play], others))
        if found is None:
            raise NotCompiledError("some ranks wait for ever with any window")
        return found

    return least_window(at, ends, unhindered, unlimited(schedule, lengths[-1]), lambda: guess)


def _ends(plays: Iterable[ArrayPlay | EventTimes | None]) -> SpanEnds | None:
    """Return when spans end; None if in one of them some ranks wait for ever."""
    found = []
    for play in plays:
        if play is None:
            return None
        found.append(play.ends())
    return SpanEnds(tuple(float(each.clocks.max()) for each in found), any(bool(each.held_up[0]) for each in found))


def _played(
    lowered: ArrayLowered, durations: Times, latency: Times, transfer: Times, batches: int
) -> ArrayPlay | EventTimes | None:
    """Play a span; None if some ranks wait for ever."""
    if transfer.any():
        graph = graph_of(lowered.code, batches, transfers=True)
        return None if graph.steps.stuck else EventTimes(graph, durations, latency, transfer)
    play = ArrayPlay(whole_span(lowered, batches, bool(latency.any())), durations, latency)
    play.run()
    return None if play.stuck else play


def _room_taken(play: ArrayPlay) -> int:
    """Return a guess of the window with which nobody waits for room, after a play in which nobody does.

    The most messages of a period that have been sent on a lane and are not used yet, halved: as many may wait to be
    used as to be sent.
    """
    span, lowering, most = play.span, play.span.lowered.lowering, 0
    part, sending = lowering.parts[0], lowering.sending[0]
    ranks = np.searchsorted(part.starts, sending, side="right") - 1
    sent = play.done(span.starts[ranks] + 1 + sending - part.starts[ranks])
    ends = np.cumsum(np.bincount(lowering.lane_of_route[part.sends[sending]], minlength=len(lowering.lanes)))
    for lane, end in zip(lowering.lanes, ends.tolist(), strict=True):
        use = lowering.uses[0].get(lane)
        if use is None or (use.lag >= span.periods).any():
            continue
        length = part.starts[lane.target + 1] - part.starts[lane.target]
        used = np.sort(play.done(span.starts[lane.target] + 1 + use.lag * length + use.position))
        here = sent[end - len(used) : end]
        waiting = np.arange(1, len(here) + 1) - np.searchsorted(used, here, side="right")
        most = max(most, int(waiting.max()))
    return -(-most // 2)


def nobody_waits_for_ever(lowered: ArrayLowered, transient: int) -> bool:
    """Whether no rank waits for ever in a span of any length; False also where that is not found out here.

    What is under way at a border of batches follows from how far each rank has come, as the play is determined. So once
    all ranks stand as far from the end of a period as they did a period before, everything from there on repeats; up to
    there a span of every length is played to its end. That is the induction of `penstock.schedule.proof.check`.

    Args:
        lowered: the schedule with its messages.
        transient: the first batch in whose period nothing that is used lies before the span.
    """
    endless = any(len(part.cls) for part in lowered.lowering.parts[1:])
    if endless and lowered.window > lowered.schedule.microbatches:
        return False  # periods have different events while windows fill
    if not endless:
        play = _without_times(lowered, 1)
        return _goes_on(play)
    found = _repeats(lowered, transient, transient + 3)
    return found if found is not None else bool(_repeats(lowered, transient, _LIMIT + 2 * transient))


def _repeats(lowered: ArrayLowered, transient: int, batches: int) -> bool | None:
    """Return whether what is under way repeats in a span of so many batches: None if not, False if ranks wait."""
    play, before = _without_times(lowered, batches), None
    for t in range(batches):
        if not _goes_on(play):
            return False
        left = (play.span.ends - play.heads).tolist()
        if left == before:
            return True
        before = left if t + 1 >= transient else None
    return None


def _without_times(lowered: ArrayLowered, batches: int) -> ArrayPlay:
    actions = len(lowered.lowering.classes.examples)
    return ArrayPlay(ArraySpan(lowered, batches), np.zeros((actions, 1)), np.zeros(1))


def _goes_on(play: ArrayPlay) -> bool:
    """Play one more period; return whether nobody waits for ever in a span that ends with it."""
    play.span.add_period()
    play.run()
    with play.drained():
        return not play.stuck
