"""PipeDream's planner: a dynamic program over prefixes, level by level of the devices, with replicated stages.

T[p, j, m] is the time of the best pipeline for the layers between the prefixes p and j on m units of a level. It is
one stage with m replicas, or a pipeline between p and k on m - r units and a last stage between k and j with r
replicas. The time that a unit of the next level takes is T with all units (Harlap et al., arXiv 1806.03377; SOSP
2019, sec. 3.1; the costs are those of the released program, `penstock.plan.stages.pipedream_cost`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.byte_sizes import human_bytes
from penstock.errors import ConfigError
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import DeviceLevel, Devices
from penstock.plan.stages.layer_ideals import PrefixFamily, all_prefixes, bits, frontier_prefixes, ordered_prefixes
from penstock.plan.stages.pipedream_cost import (
    PipeDreamCost,
    boundary_bytes,
    placed_layers,
    restricted,
    stage_seconds,
)
from penstock.plan.stages.planned import Plan, PlannedStage, Search

Floats = npt.NDArray[np.float64]

_MOST_WORK = 40_000_000_000  # comparisons: some minutes
MOST_FRONTIERS = 20_000
_MOST_EXACT = (4_000, 400)  # all prefixes, if there are at most so many: with one level of devices, with several


@dataclass(frozen=True)
class Choices:
    """What the planner may choose.

    Attributes:
        straight: no stage is replicated.
        fewer: units may be left unused.
        compression: of activations; see `PipeDreamCost`.
    """

    straight: bool = False
    fewer: bool = False
    compression: float | None = None


def plan_as_pipedream(graph: LayerGraph, devices: Devices, choices: Choices | None = None) -> Search:
    """Return the plan of the published program: the same prefixes, the same costs, every unit used.

    Raises:
        ConfigError: the graph has too many prefixes.
    """
    kept = placed_layers(graph)
    small = restricted(graph, kept)
    sets = frontier_prefixes(small, MOST_FRONTIERS)
    if sets is None:
        raise ConfigError(
            f"planner pipedream: the graph has more than {MOST_FRONTIERS:,} antichains, too many for its dynamic "
            "program; merge layers of parallel branches, or use the default planner, which then cuts along one order"
        )
    return _search("pipedream", graph, kept, small, sets, devices, choices or Choices())


def plan_for_pipedream_cost(graph: LayerGraph, devices: Devices, choices: Choices | None = None) -> Search:
    """Return the least cost in a larger space: every prefix of the graph, if they are not too many; units may be left.

    It is never above `plan_as_pipedream`, whose space is part of this one or searched, too.
    """
    kept = placed_layers(graph)
    small = restricted(graph, kept)
    given = choices or Choices()
    several = len(devices.levels) > 1
    sets, notes = all_prefixes(small, _MOST_EXACT[several]), list[str]()
    if sets is None:
        sets = frontier_prefixes(small, _MOST_EXACT[several])
        notes.append("not every cut was looked at: the graph has too many branches")
    if sets is None:
        sets = ordered_prefixes(small)
        notes.append("cuts are along one topological order")
    wider = Choices(given.straight, True, given.compression)
    return _search("default", graph, kept, small, sets, devices, wider, tuple(notes))


def _search(
    planner: str,
    graph: LayerGraph,
    kept: tuple[int, ...],
    small: LayerGraph,
    sets: tuple[int, ...],
    devices: Devices,
    choices: Choices,
    notes: tuple[str, ...] = (),
) -> Search:
    """Run the dynamic program on some prefixes of the layers that are placed, and rate what it finds."""
    program = _LevelPrograms(small, PrefixFamily(sets, len(kept)), devices, choices)
    found = program.solve()
    if found is None:
        return Search(None, why=program.why())
    stages = _with_others(found, kept, graph)
    return Search(Plan(planner, stages, PipeDreamCost(graph, devices, choices.compression).rate(stages), notes))


def _with_others(
    stages: tuple[PlannedStage, ...], kept: tuple[int, ...], graph: LayerGraph
) -> tuple[PlannedStage, ...]:
    """Return stages with the numbers of the whole graph, and with the layers that were not placed."""
    places = {number: place for place, number in enumerate(kept)}
    homes: dict[int, int] = {}  # a layer that is not placed: the place of a layer that it goes with, or -1: first stage
    for number in range(len(graph.layers)):
        if number not in places:
            sources = [edge.source for edge in graph.inputs[number] if edge.source in places]
            homes[number] = max((places[s] for s in sources), default=-1)

    def renamed(stage: PlannedStage, first: bool) -> PlannedStage:
        inner = tuple(renamed(each, first and not at) for at, each in enumerate(stage.inner))
        own = set(stage.layers)
        more = [n for n, home in homes.items() if home in own or (home < 0 and first)]
        return PlannedStage(tuple(sorted([kept[p] for p in own] + more)), stage.replicas, inner=inner)

    return tuple(renamed(stage, not at) for at, stage in enumerate(stages))


class _LevelPrograms:
    """The dynamic programs of all levels, the innermost first."""

    def __init__(self, graph: LayerGraph, family: PrefixFamily, devices: Devices, choices: Choices) -> None:
        self._family, self._devices, self._choices = family, devices, choices
        rows = family.members.astype(np.float64)
        layers = graph.layers
        self._seconds: Floats = rows @ np.array([layer.seconds for layer in layers])
        self._parameters: Floats = rows @ np.array([layer.parameters for layer in layers])
        self._held: Floats = self._parameters + rows @ np.array([layer.output + layer.frozen for layer in layers])
        self._leaving = (
            None
            if choices.compression is None
            else np.array([boundary_bytes(graph, prefix) for prefix in family.sets]) / choices.compression
        )
        self._below = [family.below(at) for at in range(len(family))]
        self._tables: list[Floats] = []
        self._check_work()

    def _check_work(self) -> None:
        """Refuse what would take hours.

        Raises:
            ConfigError: it would.
        """
        sets, pairs = len(self._family), sum(map(len, self._below))
        work = 0
        for at, level in enumerate(self._devices.levels):
            rows = 1 if at == len(self._devices.levels) - 1 else sets
            work += rows * pairs * level.units**2 // 2
        if work > _MOST_WORK:
            raise ConfigError(
                f"{sets:,} prefixes of the graph on {self._devices} devices are {work:.1e} comparisons, more than "
                f"{_MOST_WORK:.0e}; merge layers, or give fewer levels or devices"
            )

    def solve(self) -> tuple[PlannedStage, ...] | None:
        """Return the stages of the best plan; None if there is none."""
        last = len(self._devices.levels) - 1
        for at in range(last + 1):
            self._tables.append(self._level(at, 1 if at == last else len(self._family)))
        if not math.isfinite(self._tables[-1][0, -1, -1]):
            return None
        return self._stages(last, 0, len(self._family) - 1, self._devices.levels[last].units)

    def why(self) -> str:
        """Return why there is no plan."""
        states, units = len(self._family) - 1, self._devices.levels[-1].units
        if self._choices.straight and not self._choices.fewer and self._longest() < self._devices.count:
            return (
                f"a pipeline without replicas on {self._devices.count} devices needs as many stages, but the graph can "
                f"be cut into {self._longest()} at most"
            )
        if self._devices.memory is not None:
            return (
                f"no plan fits: with {units} units every plan has a stage that stashes more than "
                f"{human_bytes(self._devices.memory, 2)} ({states} prefixes searched)"
            )
        return f"there is no plan on {self._devices} devices that uses all of them"

    def _longest(self) -> int:
        """Return the most stages that a plan can have."""
        most = [0] * len(self._family)
        for at in range(1, len(most)):
            most[at] = 1 + max(most[k] for k in self._below[at])
        return most[-1]

    def _one_stage(self, at: int, before: npt.NDArray[np.intp], after: int, replicas: int, first: bool) -> Floats:
        """Return the time of a stage that ends with a prefix and begins behind each of several."""
        level = self._devices.levels[at]
        inner = self._inner_of(at, before, after)
        below = self._devices.levels[at - 1].units if at and first else 1
        parameters = self._parameters[after] - self._parameters[before]
        found = np.asarray(stage_seconds(inner, parameters, replicas, level.bandwidth, below))  # type: ignore[arg-type]
        if self._leaving is not None and not first:
            rate = level.bandwidth * replicas
            found = np.maximum(found, 2 * self._leaving[before] / rate)
            if after < len(self._family) - 1:
                found = np.maximum(found, 2 * self._leaving[after] / rate)
        return found

    def _inner_of(self, at: int, before: npt.NDArray[np.intp], after: int) -> Floats:
        """Return the time that one unit takes for the layers between prefixes."""
        inner = self._tables[at - 1][:, :, -1] if at else None
        found: Floats = self._seconds[after] - self._seconds[before] if inner is None else inner[before, after]
        return found

    def _fits(
        self, level: DeviceLevel, before: npt.NDArray[np.intp], after: int, replicas: int
    ) -> npt.NDArray[np.bool_] | None:
        """Return whether each stage fits, by the units that are used with it; None without a limit."""
        memory = self._devices.memory
        if memory is None:
            return None
        used = np.arange(replicas, level.units + 1)
        times = np.ceil((level.units - used) / replicas)
        held = self._held[after] - self._held[before]
        fits: npt.NDArray[np.bool_] = held[:, None] * times[None, :] <= memory
        return fits

    def _level(self, at: int, rows: int) -> Floats:
        """Return T for the first prefixes to begin with, all prefixes to end with, and 0 to all units."""
        level = self._devices.levels[at]
        most = 1 if self._choices.straight else level.units
        table = np.full((rows, len(self._family), level.units + 1), np.inf)
        for after in range(1, len(self._family)):
            below = self._below[after]
            starts = below[: np.searchsorted(below, rows)]
            for replicas in range(1, most + 1):
                alone = self._one_stage(at, starts, after, replicas, True)
                fits = self._fits(level, starts, after, replicas)
                if fits is not None:
                    alone = np.where(fits[:, 0], alone, np.inf)
                table[starts, after, replicas] = np.minimum(table[starts, after, replicas], alone)
            for replicas in range(1, min(most, level.units - 1) + 1):
                last = self._one_stage(at, below, after, replicas, False)[:, None]
                fits = self._fits(level, below, after, replicas)
                if fits is not None:
                    last = np.where(fits, last, np.inf)
                before = table[:, below, : level.units + 1 - replicas]
                best = np.maximum(before, last[None]).min(axis=1)
                table[:, after, replicas:] = np.minimum(table[:, after, replicas:], best)
            if self._choices.fewer:
                table[:, after] = np.minimum.accumulate(table[:, after], axis=1)
        return table

    def _stages(self, at: int, before: int, after: int, units: int) -> tuple[PlannedStage, ...]:
        """Return the stages of the best pipeline between two prefixes on so many units of a level."""
        table, level = self._tables[at], self._devices.levels[at]
        best = table[before, after, units]
        while self._choices.fewer and units > 1 and table[before, after, units - 1] == best:
            units -= 1
        most = 1 if self._choices.straight else units
        start = np.array([before])
        if (
            units <= most
            and self._fit(level, start, after, units, units)
            and (self._one_stage(at, start, after, units, True)[0] == best)
        ):
            return (self._stage(at, before, after, units),)
        for replicas in range(1, min(most, units - 1) + 1):
            below = self._below[after]
            last = self._one_stage(at, below, after, replicas, False)
            fits = self._fits(level, below, after, replicas)
            if fits is not None:
                last = np.where(fits[:, units - replicas], last, np.inf)
            hits = np.flatnonzero(np.maximum(table[before, below, units - replicas], last) == best)
            if len(hits):
                cut = int(below[hits[0]])
                return (*self._stages(at, before, cut, units - replicas), self._stage(at, cut, after, replicas))
        raise AssertionError("the table holds a time that no plan has")

    def _fit(self, level: DeviceLevel, before: npt.NDArray[np.intp], after: int, replicas: int, used: int) -> bool:
        """Return whether one stage fits if so many units are used with it."""
        fits = self._fits(level, before, after, replicas)
        return fits is None or bool(fits[0, used - replicas])

    def _stage(self, at: int, before: int, after: int, replicas: int) -> PlannedStage:
        """Return a stage between two prefixes with the pipeline that each replica is."""
        units = self._devices.levels[at - 1].units if at else 0
        inner = self._stages(at - 1, before, after, units) if at else ()
        return PlannedStage(tuple(bits(self._family.sets[after] & ~self._family.sets[before])), replicas, inner=inner)
