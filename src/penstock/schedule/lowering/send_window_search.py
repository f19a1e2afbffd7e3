"""Finds how many messages must be outstanding on a lane so that waiting for room costs no time.

With too few, senders wait for buffers, and messages that are under way for long arrive late; with more, memory is
wasted. How many are enough depends on the order, on how long passes take and on how long messages travel, so the
schedule is played and the least window is searched for. The larger the window, the earlier everything happens: no wait
becomes longer, so the makespan never grows with it, and halving finds the least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

from penstock.errors import ScheduleError
from penstock.schedule.ir.absolute_actions import since
from penstock.schedule.ir.schedule import WINDOW, Action, Schedule
from penstock.schedule.lowering.lower import Lowering
from penstock.schedule.machine.default_durations import unit_time
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.message_lanes import Latency
from penstock.schedule.machine.play import Machine


def lower_freely(
    schedule: Schedule,
    duration: Callable[[Action], float] = unit_time,
    latency: Latency = 0.0,
    spans: Collection[int] = (),
    narrow: Lowered | None = None,
    transfer: float = 0.0,
) -> Lowered:
    """Lower a schedule with the least window, of at least `WINDOW`, that costs no time.

    It costs none if a span of batches ends as soon as with the window `unlimited`. The schedule's own window is not
    looked at.

    Args:
        schedule: what to lower.
        duration: time of each action.
        latency, transfer: of messages, as of `Machine`.
        spans: numbers of batches between two drains that must not take longer. One that shows how batches follow each
            other in a long run is always among them.
        narrow: the schedule with a window of `WINDOW`, where it has been lowered with that before.

    Raises:
        ScheduleError: some ranks wait for ever, with any window.
    """
    hop = latency, transfer
    lengths = sorted({settled(schedule), *spans})
    lowering: Lowering | None = None

    def at(window: int) -> Lowered | None:
        nonlocal lowering
        if window == WINDOW and narrow is not None:
            return narrow
        lowering = lowering or Lowering(schedule)
        return _at(lowering, window)

    def unhindered(enough: int) -> SpanEnds:
        free = _ends((lowering or Lowering(schedule)).at(enough), duration, hop, lengths, raises=True)
        assert free is not None
        return free

    return least_window(at, lambda lowered: _ends(lowered, duration, hop, lengths), unhindered, unlimited(schedule))


_Found = TypeVar("_Found")


def least_window(
    at: Callable[[int], _Found | None],
    ends: Callable[[_Found], SpanEnds | None],
    unhindered: Callable[[int], SpanEnds],
    enough: int,
    near: Callable[[], int] | None = None,
) -> _Found:
    """Find the least window, of at least `WINDOW`, that costs no time; return what is lowered with it.

    Args:
        at: lowers with a window; None where there are too few buffers.
        ends: when spans end with it; None if some ranks wait for ever.
        unhindered: when they end with the window that it is given.
        enough: a window with which nobody waits for room.
        near: after `unhindered`, a guess; the search begins there.

    Raises:
        ScheduleError: as `unhindered`.
    """
    narrow = at(WINDOW)
    first = None if narrow is None else ends(narrow)
    if narrow is not None and first is not None and not first.held_up:
        return narrow
    free = unhindered(enough)
    if narrow is not None and first is not None and first.as_early_as(free):
        return narrow

    best: tuple[int, _Found] | None = None  # the least window that has been enough

    def is_enough(window: int) -> bool:
        nonlocal best
        lowered = at(window)
        found = None if lowered is None else ends(lowered)
        if lowered is None or found is None or not found.as_early_as(free):
            return False
        best = window, lowered
        return True

    least = least_number(is_enough, enough, 2 * WINDOW if near is None else min(max(near(), WINDOW + 1), enough))
    found = best[1] if best is not None and best[0] == least else at(least)
    assert found is not None
    return found


def least_number(is_enough: Callable[[int], bool], enough: int, guess: int) -> int:
    """Find the least number that is enough, of which `WINDOW` is not and `enough` is, in steps that double."""
    below, above, step = WINDOW, enough, 1
    if is_enough(guess):
        above = guess
        while above - step > below and is_enough(above - step):
            above, step = above - step, 2 * step
        below = max(above - step, below)
    else:
        below = guess
        while below + step < above and not is_enough(below + step):
            below, step = below + step, 2 * step
        above = min(below + step, above)
    return bisect_left(range(above), True, lo=below + 1, hi=above, key=is_enough)


def settled(schedule: Schedule) -> int:
    """Return a number of batches after which a further one repeats what the ones before did.

    2 where the pipeline empties after each batch; otherwise 3 more than the oldest batch that a period still works on.
    """
    if not any(program.epilogue for program in schedule.programs):
        return 2
    actions = [p for program in schedule.programs for a in program.period for p in a.parts or (a,)]
    return 3 + max((since(p.unit, schedule.microbatches) for p in actions), default=0)


def unlimited(schedule: Schedule, batches: int | None = None) -> int:
    """Return a window with which nobody waits for room: all that a lane carries in a `settled` span, or more.

    Args:
        schedule: whose.
        batches: the length of the span, where it is known.
    """
    rank_of = {(stage.index, stage.direction): stage.rank for stage in schedule.stages}
    joined: Counter[tuple[int, int]] = Counter()  # edges between two ranks
    for (index, direction), rank in rank_of.items():
        for edge in schedule.successors[index]:
            target = rank_of.get((edge.target, direction), rank)
            if target != rank:
                joined.update([(rank, target), (target, rank)])
    held = Counter(stage.rank for stage in schedule.stages)  # whose activations may be parked elsewhere
    routes = max([*joined.values(), *held.values(), WINDOW])
    return routes * schedule.microbatches * schedule.slices * (batches or settled(schedule))


def _at(lowering: Lowering, window: int) -> Lowered | None:
    """The schedule with a window; None if messages that are used out of order need more buffers."""
    try:
        return lowering.at(window)
    except ScheduleError:
        return None


class SpanEnds(NamedTuple):
    """When spans of several lengths end, and whether anybody has waited for room or for a buffer to be posted."""

    makespans: tuple[float, ...]
    held_up: bool

    def as_early_as(self, other: SpanEnds) -> bool:
        """Whether no span ends later; sums of the same times in another order may differ in their last bits."""
        return all(a <= b * (1 + 1e-9) for a, b in zip(self.makespans, other.makespans, strict=True))


def _ends(
    lowered: Lowered,
    duration: Callable[[Action], float],
    hop: tuple[Latency, float],
    spans: Collection[int],
    *,
    raises: bool = False,
) -> SpanEnds | None:
    """Play spans of several lengths; None if some ranks wait for ever.

    Raises:
        ScheduleError: they do, and `raises` is set.
    """
    machines = [Machine(lowered, duration, hop[0], transfer=hop[1]) for _ in spans]
    try:
        for machine, batches in zip(machines, spans, strict=True):
            machine.play(batches)
    except ScheduleError:
        if raises:
            raise
        return None
    return SpanEnds(tuple(max(machine.clock) for machine in machines), any(machine.held_up for machine in machines))
