"""How many messages must be outstanding on a lane, where an order does not know that itself.

Where several chunks, or both directions, send on one lane, how far a sender gets ahead depends on the whole order, and
so does how far messages are used in another order than they are sent in. Playing the schedule says how far.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.machine.lower import lower
from penstock.schedule.machine.play import Machine


def widened(schedule: Schedule) -> Schedule | None:
    """A schedule whose window is too small, with the least one that does; None if no window does.

    It does if nobody waits for ever and no larger one lets the batch end sooner, where each pass takes one unit of time
    and messages take none. (The least with which nobody waits for ever can be one less, at the price of some idle time:
    of zb-interleaved on 8 ranks, 52.5 forwards instead of 51.5. An order that can run with the window it asks for keeps
    that one, even so.)

    Of a schedule that does not empty the pipeline after each batch nothing is known.
    """
    if any(program.epilogue for program in schedule.programs):
        return None
    bound = 3 * len(schedule.edges) * schedule.microbatches * schedule.slices  # all messages of a batch: F, R and B
    shortest, least = _makespan(schedule, bound), schedule.window
    if shortest == math.inf:
        return None
    while _makespan(schedule, 2 * least) > shortest:
        least *= 2
    return replace(
        schedule,
        window=bisect_left(range(2 * least), True, lo=least + 1, key=lambda w: _makespan(schedule, w) <= shortest),
    )


def _makespan(schedule: Schedule, window: int) -> float:
    """When the last rank is done with a batch; infinite if some wait for ever."""
    try:
        machine = Machine(lower(schedule, window=window), duration=lambda _: 1.0)
        machine.play(1)
    except ScheduleError:
        return math.inf
    return max(machine.clock)
