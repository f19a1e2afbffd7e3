"""The least number of microbatches in flight on each rank that hides the time of messages.

In a steady state without bubbles a rank begins a forward every T, the period: the time that the slowest rank works for
a microbatch, or that a message occupies its lane if that is longer. Rank s runs the backward of a microbatch directly
behind the forward of the one w(s) later, so D(s), the time from the start of a forward to that of its backward, is at
least w(s) T + f(s), and the backward must be done before the next forward begins, at (w(s) + 1) T. It takes D(s + 1),
and the way there and back:

    D(p - 1) = f(p - 1),  D(s) = max(w(s) T + f(s), f(s) + c + D(s + 1) + g(s + 1) + c)

with the time c of a message (each hop may have its own there and back) and g of what a gradient waits for on the rank
behind (a backward, or its first half where it comes in two). The least w(s) that leaves room for it, from the last rank
to the first, is the least at all: a smaller D(s + 1) never makes a larger D(s). For p equal ranks w(s) = (p - 1 - s)
(1 + ceil(2 c / T)): whole passes are put between, so each hop is rounded up by itself.

Where fewer are allowed, the period is longer, and that of all ranks: a rank with w(s) of the shorter period would run a
backward only behind a forward that the ranks before it may not begin yet. All w(s) fall with T, so the best that is
allowed are the least w(s) at the shortest T with which all of them are.

At its beginning a rank waits for its first gradient if its forwards are done before: in ZB-H2 it has as many of them
ahead as fill that time, too. It is f(s) + c + D'(s + 1) + g(s + 1) + c, with D' from the start of the first forward of
the rank behind to that of its first backward, behind all forwards that rank has ahead.

With v chunks on a rank, in turns and in groups of g microbatches (interleaved 1F1B), a pass of a chunk has a slot of
T / v for its forward and its backward. A hop forward and one backward together take h slots, a whole number, in which
the passes and the messages of both have room; and a microbatch is back on the first rank, for its next chunk, g slots
later, so p hops of either kind take no longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import gt
from typing import NamedTuple

from penstock.schedule.ir.in_flight_option import in_flight_on
from penstock.simulate.costs import Costs

Hops = float | Sequence[tuple[float, float]]
"""c: of all messages; or, for every hop, of the activation there and of the gradient back."""
_ROUNDING = 1e-9


class RankTimes(NamedTuple):
    """The times of a microbatch on one rank.

    Attributes:
        forward: of its forward.
        returns: from the start of its backward to that of the message with its gradient.
        rest: of what remains of the backward after that.
    """

    forward: float
    returns: float
    rest: float = 0.0

    @property
    def total(self) -> float:
        """Of all its work."""
        return self.forward + self.returns + self.rest


def rank_times(costs: Costs, *, splits: bool) -> list[RankTimes]:
    """Return the times of a chain of stages, one on each rank.

    Args:
        costs: of every stage.
        splits: backwards come in two halves, so that a gradient need not wait for the second one.
    """
    return [
        RankTimes(stage.forward, stage.backward_input, stage.backward_weight)
        if splits
        else RankTimes(stage.forward, stage.backward_input + stage.backward_weight)
        for stage in costs.stages
    ]


def least_in_flight(
    times: Sequence[RankTimes],
    hops: Hops,
    transfer: float = 0.0,
    leave: float = _ROUNDING,
    most: Sequence[float] | None = None,
    *,
    fills: bool = False,
) -> tuple[int, ...]:
    """Return, per rank, the least number of microbatches in flight with which no rank waits for messages.

    Args:
        times: of every rank.
        hops: c, from the end of a pass to the arrival of what it sends.
        transfer: the part of it in which a message occupies its lane.
        leave: the share of T by which waits may lengthen it, as that is not worth the memory of another microbatch.
        most: of each rank; if that is too few, the least numbers with which ranks wait no longer than they have to.
        fills: no rank waits for its first gradient, either.
    """
    period = max(max(here.total for here in times), transfer)
    if not period:
        return tuple(range(len(times), 0, -1))
    each = [(hops, hops)] * (len(times) - 1) if isinstance(hops, int | float) else hops
    found, lead, first = [1], times[-1].forward, times[-1].forward
    for (here, behind), (there, back) in reversed(list(zip(pairwise(times), each, strict=True))):
        way = here.forward + there + behind.returns + back
        lead, first = lead + way, first + way
        ahead = math.ceil((lead + here.returns + here.rest) / (period * (1 + leave)) - 1)
        if fills and here.forward:
            ahead = max(ahead, math.ceil(first / (here.forward * (1 + leave))) - 1, found[-1] - 1)
            first = max(first, (ahead + 1) * here.forward)
        lead = max(lead, ahead * period + here.forward)
        found.append(ahead + 1)
    if most is not None and any(map(gt, reversed(found), most)):
        least = _at_a_longer_period(times, each, period, leave, most)
        spread = in_flight_on(len(times), int(min(most)) if fills else 1)
        return tuple(max(number, min(pair)) for number, *pair in zip(least, reversed(found), spread, strict=True))
    return tuple(reversed(found))


def _at_a_longer_period(
    times: Sequence[RankTimes], hops: Hops, low: float, leave: float, most: Sequence[float]
) -> tuple[int, ...]:
    """Return the numbers at the shortest period, longer than `low`, with which no rank has more than allowed."""
    high = 2 * low
    while any(map(gt, found := least_in_flight(times, hops, high, leave), most)):
        low, high = high, 2 * high
    while high - low > _ROUNDING * high:
        middle = (low + high) / 2
        fewer = least_in_flight(times, hops, middle, leave)
        if any(map(gt, fewer, most)):
            low = middle
        else:
            high, found = middle, fewer
    return found


def least_interleaved(
    times: Sequence[RankTimes], chunks: int, hop: float, transfer: float = 0.0, leave: float = _ROUNDING
) -> tuple[int, int]:
    """Return for interleaved 1F1B the least slots h of a hop there and back, at least 2, and the least group g.

    Args:
        times: of the whole share of every rank; the slowest ones count for all.
        chunks: v.
        hop, transfer, leave: as of `least_in_flight`.
    """
    slot = max(max(here.total for here in times) / chunks, transfer)
    if not slot:
        return 2, len(times)
    there = (max(here.forward for here in times) / chunks + hop) / slot
    back = (max(here.returns for here in times) / chunks + hop) / slot
    slots = max(math.ceil((there + back) / (1 + leave) - _ROUNDING), 2)
    longest = max(slots / 2, there / (1 + leave), back / (1 + leave))
    return slots, max(math.ceil(len(times) * longest - _ROUNDING), len(times))
