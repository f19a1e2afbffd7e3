"""The order of devices along a pipeline: recursive minimum cuts of the graph of bandwidths (SPP, arXiv 2204.10562).

A cut that least bandwidth crosses divides the devices in two, each half likewise, down to single ones. So devices that
stand side by side are joined by fast links, and stages cross slow ones as seldom as can be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.checks import is_number
from penstock.errors import ConfigError
from penstock.plan.stages.device_hierarchy import Devices

Floats = npt.NDArray[np.float64]

MOST_LINKED = 128
"""Devices of a matrix of links."""


def link_matrix(devices: Devices) -> Floats:
    """Return the bandwidths between all pairs of devices that stand in levels.

    Raises:
        ConfigError: there are too many.
    """
    count = devices.count
    if count > MOST_LINKED:
        raise ConfigError(f"links of each pair are known for {MOST_LINKED} devices at most, got {count}")
    number = np.arange(count)
    found = np.zeros((count, count))
    size = 1
    for level in devices.levels:
        inside = number // (size * level.units)
        apart = (number[:, None] // size != number[None, :] // size) & (inside[:, None] == inside[None, :])
        found[apart] = level.bandwidth
        size *= level.units
    return found


def checked_links(rows: object) -> Floats:
    """Return a matrix of bandwidths.

    Raises:
        ConfigError: it is none: not square, not symmetric, or with a number that is not positive beside its diagonal.
    """
    if not isinstance(rows, list) or not rows or len(rows) > MOST_LINKED:
        raise ConfigError(f"links must be a list of 1 to {MOST_LINKED} rows of numbers")
    if not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        raise ConfigError(f"links must be square: {len(rows)} rows need as many numbers each")
    for at, row in enumerate(rows):
        for to, value in enumerate(row):
            if at != to and not (is_number(value) and 0 < value < 1e30):
                raise ConfigError(f"links: bytes per second from {at} to {to} must be above 0, got {value!r:.40}")
    found = np.array([[0.0 if a == b else float(v) for b, v in enumerate(row)] for a, row in enumerate(rows)])
    if not np.array_equal(found, found.T):
        at, to = (int(each[0]) for each in np.nonzero(found != found.T))
        raise ConfigError(
            f"links must be symmetric: {at} to {to} has {found[at, to]:g}, the way back {found[to, at]:g}"
        )
    return found


def least_cut(weights: Floats) -> tuple[float, frozenset[int]]:
    """Return the least weight of a cut of a graph, and one side of it (Stoer and Wagner, J. ACM 1997).

    Args:
        weights: symmetric, of at least two nodes.
    """
    left, groups = weights.copy(), [frozenset([n]) for n in range(len(weights))]
    best: tuple[float, frozenset[int]] = (np.inf, frozenset())
    while len(groups) > 1:
        order, attached = [0], left[0].copy()
        attached[0] = -np.inf
        while len(order) < len(groups):
            nearest = int(np.argmax(attached))
            order.append(nearest)
            attached += left[nearest]
            attached[nearest] = -np.inf
        last, before = order[-1], order[-2]
        cut = float(left[last].sum() - left[last, last])
        if cut < best[0]:
            best = cut, groups[last]
        left[before] += left[last]
        left[:, before] += left[:, last]
        left[before, before] = 0.0
        left = np.delete(np.delete(left, last, 0), last, 1)
        groups[before] |= groups[last]
        del groups[last]
    return best


def device_order(weights: Floats) -> tuple[int, ...]:
    """Return the devices in the order in which stages take them.

    Args:
        weights: bandwidths of all pairs.
    """
    placed: list[int] = []

    def place(devices: list[int]) -> None:
        if len(devices) == 1:
            placed.extend(devices)
            return
        _, side = least_cut(weights[np.ix_(devices, devices)])
        halves = [[d for n, d in enumerate(devices) if (n in side) is one] for one in (True, False)]
        near = placed[-1:]
        halves.sort(key=lambda half: (-float(weights[np.ix_(near, half)].sum()) / len(half), half[0]))
        for half in halves:
            place(half)

    place(list(range(len(weights))))
    return tuple(placed)


def ordered_links(weights: Floats) -> Floats:
    """Return the bandwidths of all pairs, with the devices in the order in which stages take them."""
    order = device_order(weights)
    return np.asarray(weights[np.ix_(order, order)])
