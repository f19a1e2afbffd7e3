"""Which way to execute each layer of a stage, so that it fits and takes the least time: a knapsack with choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.plan.stages.layer_row import Floats

MOST_POINTS = 100_000
"""Points of a front; where there are more, `least_time` gives up."""


@dataclass(frozen=True)
class ChosenWays:
    """A choice for every layer.

    Attributes:
        seconds: their sum.
        ways: the number of the chosen way of each layer.
    """

    seconds: float
    ways: tuple[int, ...]


def best_ways(
    seconds: list[Floats], memory: list[Floats], limit: float, most: int = MOST_POINTS
) -> tuple[ChosenWays | None, bool]:
    """Return the fastest choice that fits, None if none does, and whether it is exact: `greedy_time` if not.

    Arguments are as of `least_time`.
    """
    try:
        return least_time(seconds, memory, limit, most), True
    except OverflowError:
        return greedy_time(seconds, memory, limit), False


def least_time(seconds: list[Floats], memory: list[Floats], limit: float, most: int = MOST_POINTS) -> ChosenWays | None:
    """Return the fastest choice that fits; None if none does.

    The Pareto front of (memory, time) is built layer by layer; it stays small where layers are alike.

    Args:
        seconds: the times of the ways of each layer.
        memory: their bytes.
        limit: what all layers together may take.
        most: points of the front.

    Raises:
        OverflowError: the front has more points.
    """
    left = np.cumsum([0.0, *(each.min() for each in reversed(memory))])[::-1]
    held, taken = np.zeros(1), np.zeros(1)
    trail: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
    for at, (times, sizes) in enumerate(zip(seconds, memory, strict=True)):
        new_held = (held[:, None] + sizes[None, :]).ravel()
        new_taken = (taken[:, None] + times[None, :]).ravel()
        order = np.lexsort((new_taken, new_held))
        order = order[new_held[order] + left[at + 1] <= limit]
        if not len(order):
            return None
        best = np.minimum.accumulate(new_taken[order])
        kept = order[np.concatenate(([True], best[1:] < best[:-1]))]
        if len(kept) > most:
            raise OverflowError
        held, taken = new_held[kept], new_taken[kept]
        trail.append((kept // len(sizes), kept % len(sizes)))
    point = len(taken) - 1
    total, ways = float(taken[point]), []
    for parents, chosen in reversed(trail):
        ways.append(int(chosen[point]))
        point = int(parents[point])
    return ChosenWays(total, tuple(reversed(ways)))


def greedy_time(seconds: list[Floats], memory: list[Floats], limit: float) -> ChosenWays | None:
    """Return a choice that fits and is nearly the fastest; None if none fits.

    From the fastest ways, the change with the least time per byte saved is made until the stage fits; then changes that
    are no longer needed are taken back, the dearest ones first.
    """
    fastest = [int(np.lexsort((sizes, times))[0]) for times, sizes in zip(seconds, memory, strict=True)]
    ways, held = list(fastest), sum(float(memory[at][way]) for at, way in enumerate(fastest))
    while held > limit:
        best: tuple[float, int, int] | None = None
        for at, way in enumerate(ways):
            for other in range(len(seconds[at])):
                saved = memory[at][way] - memory[at][other]
                if saved > 0:
                    rate = float((seconds[at][other] - seconds[at][way]) / saved)
                    best = min(best or (rate, at, other), (rate, at, other))
        if best is None:
            return None
        _, at, other = best
        held += float(memory[at][other] - memory[at][ways[at]])
        ways[at] = other
    gains = sorted((float(seconds[at][fastest[at]] - seconds[at][way]), at) for at, way in enumerate(ways))
    for gain, at in gains:
        more = float(memory[at][fastest[at]] - memory[at][ways[at]])
        if gain < 0 and held + more <= limit:
            held, ways[at] = held + more, fastest[at]
    return ChosenWays(sum(float(seconds[at][way]) for at, way in enumerate(ways)), tuple(ways))


def _counted(saved: Floats, cost: Floats, excess: Floats) -> Floats:
    """Return what changes cost at least, by their number: it is exact where all layers are alike.

    Changes that save less than half of the largest saving are free here; so many others are needed at least, and they
    cost no less than the cheapest ones.
    """
    large = saved >= saved.max(axis=1, keepdims=True) / 2
    needed = excess - np.where(large, 0.0, saved).sum(axis=1)
    sums = (-np.sort(-np.where(large, saved, 0.0), axis=1)).cumsum(axis=1)
    count = (sums * (1 + 1e-12) < needed[:, None]).sum(axis=1) + (needed > 0)
    costs = np.sort(np.where(large & (saved > 0), cost, np.inf), axis=1)
    costs = np.where(np.isfinite(costs), costs, 0.0).cumsum(axis=1)
    totals = np.concatenate((np.zeros((len(costs), 1)), costs), axis=1)
    return np.take_along_axis(totals, np.minimum(count, costs.shape[1])[:, None], axis=1)[:, 0]


def bounds_of_two(
    seconds: Floats, memory: Floats, inside: npt.NDArray[np.bool_], limit: float
) -> tuple[Floats, Floats]:
    """Return a lower and an upper bound of the least time for many stages whose layers have one or two ways.

    The lower bound divides the last change, as the relaxed problem does, or counts changes; the upper one is the best
    of three: whole changes by time per byte, the same with the dearest needless change taken back, and all but the
    last change with the cheapest single one that does.

    Args:
        seconds: (stage, layer, 2).
        memory: (stage, layer, 2).
        inside: whether a stage holds a layer.
        limit: of a stage.

    Returns:
        Two arrays with an entry for each stage; infinite where nothing fits.
    """
    first = (seconds[:, :, 0] < seconds[:, :, 1]) | (
        (seconds[:, :, 0] == seconds[:, :, 1]) & (memory[:, :, 0] <= memory[:, :, 1])
    )
    fast, slow = (np.where(first, seconds[:, :, a], seconds[:, :, b]) for a, b in ((0, 1), (1, 0)))
    large, small = (np.where(first, memory[:, :, a], memory[:, :, b]) for a, b in ((0, 1), (1, 0)))
    base = np.where(inside, fast, 0.0).sum(axis=1)
    excess = np.where(inside, large, 0.0).sum(axis=1) - limit
    saved = np.where(inside & np.isfinite(slow), np.maximum(large - small, 0.0), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        cost = np.where(saved > 0, slow - fast, np.inf)
        order = np.argsort(np.where(saved > 0, cost / saved, np.inf), axis=1, kind="stable")
    saved_by = np.take_along_axis(saved, order, axis=1)
    cost_by = np.where(saved_by > 0, np.take_along_axis(cost, order, axis=1), 0.0)
    sum_saved, sum_cost = saved_by.cumsum(axis=1), cost_by.cumsum(axis=1)
    rows = np.arange(len(base))
    enough = sum_saved >= excess[:, None]
    last = np.argmax(enough, axis=1)
    fits, free = enough.any(axis=1), excess <= 0
    before_saved = sum_saved[rows, last] - saved_by[rows, last]
    before_cost = sum_cost[rows, last] - cost_by[rows, last]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.nan_to_num((excess - before_saved) / saved_by[rows, last])
    lower = base + np.maximum(before_cost + share * cost_by[rows, last], _counted(saved, cost, excess))
    chosen = np.arange(saved_by.shape[1])[None, :] <= last[:, None]
    slack = sum_saved[rows, last] - excess
    needless = np.where(chosen & (saved_by <= slack[:, None]), cost_by, 0.0).max(axis=1)
    single = np.where(~chosen & (saved_by >= (excess - before_saved)[:, None]) & (saved_by > 0), cost_by, np.inf)
    upper = base + np.minimum(sum_cost[rows, last] - needless, before_cost + single.min(axis=1))
    lower, upper = (np.where(free, base, np.where(fits, bound, np.inf)) for bound in (lower, upper))
    return lower, upper
