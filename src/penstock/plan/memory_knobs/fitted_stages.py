"""The fastest ways to execute runs of layers so that each run fits as a stage, found once for runs that are alike."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import Way
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.knapsack import greedy_time, least_time
from penstock.plan.stages.layer_row import Floats, running_sums

_MOST_POINTS = 5_000  # of the front of a run; where there are more, its ways are found by a heuristic
_MOST_STEPS = 100_000  # layers of all runs whose ways are chosen


class FittedRun(NamedTuple):
    """The ways of a run of layers.

    Attributes:
        seconds: their sum; infinite if nothing fits.
        ways: of each layer.
    """

    seconds: float
    ways: tuple[Way, ...]


_NOTHING = FittedRun(math.inf, ())


class FittedStages:
    """Knows the fastest ways of runs of a row of layers.

    Attributes:
        heuristic: whether some run had too many choices to be exact.
    """

    def __init__(self, options: list[tuple[Way, ...]], memory: float | None, microbatches: int) -> None:
        """Take the ways of each layer of the row.

        Args:
            options: of each layer.
            memory: bytes of a device; None for no limit.
            microbatches: per batch; no stage holds more.
        """
        self.heuristic, self._steps = False, 0
        self._options, self._m = options, microbatches
        self._limit = math.inf if memory is None else memory * TOLERANCE
        self._fastest = [min(ways, key=lambda way: way.seconds) for ways in options]
        kinds = {ways: kind for kind, ways in enumerate(dict.fromkeys(map(_numbers, options)))}
        self._kinds = [kinds[_numbers(ways)] for ways in options]
        self._known: dict[tuple[tuple[int, ...], int], tuple[float, tuple[int, ...]]] = {}
        self.seconds: Floats = running_sums(way.seconds for way in self._fastest)
        """At least, up to each layer."""

    def run(self, first: int, last: int, left: int) -> FittedRun:
        """Return the fastest ways of the layers from `first` up to `last`, not included, that fit.

        Args:
            first, last: of the row.
            left: stages in the pipeline from this one on; it holds so many microbatches.

        Raises:
            ConfigError: too many runs were asked for.
        """
        flight = min(left, self._m)
        fastest = self._fastest[first:last]
        if sum(_bytes(way, flight) for way in fastest) <= self._limit:
            return FittedRun(float(self.seconds[last] - self.seconds[first]), tuple(fastest))
        key = tuple(self._kinds[first:last]), flight
        if key not in self._known:
            self._known[key] = self._chosen(self._options[first:last], flight)
        seconds, chosen = self._known[key]
        if not chosen:
            return _NOTHING
        return FittedRun(seconds, tuple(ways[n] for ways, n in zip(self._options[first:last], chosen, strict=True)))

    def _chosen(self, options: list[tuple[Way, ...]], flight: int) -> tuple[float, tuple[int, ...]]:
        """Return the seconds and the numbers of the fastest ways that fit; none if nothing does.

        Raises:
            ConfigError: too many runs were asked for.
        """
        if sum(min(_bytes(way, flight) for way in ways) for ways in options) > self._limit:
            return math.inf, ()
        self._steps += len(options)
        if self._steps > _MOST_STEPS:
            raise ConfigError(
                f"planner 'dawnpiper' would choose what to keep for too many stages of {len(self._options)} layers; "
                "merge layers, or plan for more memory"
            )
        seconds = [np.array([way.seconds for way in ways]) for ways in options]
        memory = [np.array([_bytes(way, flight) for way in ways]) for ways in options]
        try:
            found = least_time(seconds, memory, self._limit, _MOST_POINTS)
        except OverflowError:
            found = greedy_time(seconds, memory, self._limit)
            self.heuristic = True
        return (math.inf, ()) if found is None else (found.seconds, found.ways)


def _bytes(way: Way, flight: int) -> float:
    """Return what a layer takes with so many microbatches in flight."""
    return way.memory + flight * way.memory_per_microbatch


def _numbers(ways: tuple[Way, ...]) -> tuple[tuple[float, float, float], ...]:
    """Return what tells the ways of two layers apart."""
    return tuple((way.seconds, way.memory, way.memory_per_microbatch) for way in ways)
