"""BaPipe's planner (Zhao et al., arXiv 2012.12544): the schedule and a balanced cut, chosen together.

As published: all devices are used. For each schedule the cut is balanced: of those that fit, the slowest period is as
short as can be, and then messages are as few as can be; closed forms decide between the schedules and data parallelism.
A balanced cut is not the fastest one, since messages also take time while the pipeline fills and drains.
`plan_for_bapipe_cost` finds the fastest of all cuts, on any number of devices: for each bound on the period it makes
messages as few as can be. Layers are cut along one topological order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.planners.two_bw import widths
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.schedule_choice.bapipe_cost import SCHEDULES, BaPipeCost, MessageSchedule
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import TOLERANCE
from penstock.plan.stages.layer_row import (
    Floats,
    border_bytes,
    depths_by_link,
    row_stages,
    running_sums,
    single_device_options,
)
from penstock.plan.stages.planned import Plan, PlannedStage, Search

Flags = npt.NDArray[np.bool_]

_MOST_WORK = 2e9  # cells of the dynamic programs of one schedule
_FEWEST_BOUNDS = 16  # that are tried at least, where periods are many
_THINNED = "only some bounds on the period were tried: the best that was found, not proven to be the best there is"


def plan_as_bapipe(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the plan of the published search, on all devices.

    Raises:
        ConfigError: a layer cannot run on a single device, or the search would be too large.
    """
    search = _BaPipeSearch(graph, devices, microbatches)
    deepest = min(devices.count, len(graph.layers))
    plans = [*search.pipelines(deepest, balanced=True), *search.replicated([devices.count])]
    return search.answer(plans)


def plan_for_bapipe_cost(graph: LayerGraph, devices: Devices, microbatches: int) -> Search:
    """Return the fastest plan of all.

    Raises:
        ConfigError: as `plan_as_bapipe`.
    """
    search = _BaPipeSearch(graph, devices, microbatches)
    deepest = min(devices.count, len(graph.layers))
    plans = [*search.pipelines(deepest, balanced=True), *search.pipelines(deepest, balanced=False)]
    return search.answer([*plans, *search.replicated(widths(devices.count, 1, microbatches))])


class _BaPipeSearch:
    """Plans of a graph along one topological order."""

    def __init__(self, graph: LayerGraph, devices: Devices, microbatches: int) -> None:
        ways = single_device_options(graph, "planner 'bapipe'")
        first = [ways[number][0] for number in graph.order]
        self._graph, self._devices, self._m = graph, devices, microbatches
        self._cost, self._border = BaPipeCost(graph, devices, microbatches), border_bytes(graph)
        self._compute, self._always, self._each = (
            running_sums(getattr(way, key) for way in first) for key in ("seconds", "memory", "memory_per_microbatch")
        )
        self._notes = () if graph.order == tuple(range(len(first))) else ("cuts are along one order of layers",)

    def answer(self, plans: list[Plan]) -> Search:
        """Return the best of some plans."""
        best = min(plans, key=lambda plan: plan.rating.seconds)
        if math.isinf(best.rating.seconds):
            said = f"no pipeline does with either schedule, and of data parallelism {best.rating.fault}"
            return Search(None, why=f"no plan fits: {said}")
        return Search(best)

    def replicated(self, counts: Iterable[int]) -> Iterator[Plan]:
        """Yield data parallelism on so many devices each."""
        for count in counts:
            stages = (PlannedStage(tuple(range(len(self._graph.layers))), count),)
            yield Plan(BaPipeCost.name, stages, self._cost.rate(stages), ("data parallelism",) if count > 1 else ())

    def pipelines(self, deepest: int, balanced: bool) -> Iterator[Plan]:
        """Yield pipelines of single devices that fit.

        Args:
            deepest: number of stages.
            balanced: whether only that number is tried, with the balanced cut; otherwise the fastest of all cuts is
                found for every number up to it.
        """
        for bandwidth, depths in depths_by_link(self._devices, deepest):
            if balanced and depths[-1] != deepest:
                continue
            for schedule in SCHEDULES:
                cuts = _Cuts(self._period(schedule, bandwidth), self._fits(schedule, deepest), self._border / bandwidth)
                found = cuts.balanced(deepest) if balanced else self._fastest(cuts, depths)
                if found is None:
                    continue
                stages = row_stages(self._graph, found)
                notes = (f"schedule {schedule.name}", *self._notes) if len(stages) > 1 else ()
                notes += (_THINNED,) if cuts.thinned else ()
                yield Plan(BaPipeCost.name, stages, self._cost.rate_with(stages, schedule), notes)

    def _period(self, schedule: MessageSchedule, bandwidth: float) -> Floats:
        """Return the periods of all stages: (first layer, layer after the last)."""
        hop = self._border / bandwidth
        compute = self._compute[None, :] - self._compute[:, None]
        if schedule.overlapped:
            period = np.maximum(compute, np.maximum(hop[:, None], hop[None, :]))
        else:
            period = compute + hop[:, None] + hop[None, :]
        return np.where(np.triu(np.ones_like(period, dtype=bool), 1), period, np.inf)

    def _fits(self, schedule: MessageSchedule, deepest: int) -> list[Flags]:
        """Return which stages fit, by the stages left in the pipeline.

        Raises:
            ConfigError: the search would be too large.
        """
        always, each = (sums[None, :] - sums[:, None] for sums in (self._always, self._each))
        if always.size * deepest > _MOST_WORK / _FEWEST_BOUNDS:
            raise ConfigError(
                f"planner 'bapipe' would look at too many cuts of {len(always) - 1} layers into {deepest} stages; "
                "merge layers, or plan for fewer devices"
            )
        if self._devices.memory is None:
            return [np.ones_like(always, dtype=bool)] * deepest
        limit = self._devices.memory * TOLERANCE
        flights = (schedule.in_flight(left, self._m) for left in range(1, deepest + 1))
        return [always + flight * each <= limit for flight in flights]

    def _fastest(self, cuts: _Cuts, depths: list[int]) -> tuple[int, ...] | None:
        """Return where the stages of the fastest pipeline begin; None if none fits."""
        best, found = math.inf, None
        for bound in cuts.bounds(depths):
            steady = (self._m - 1) * bound
            if steady >= best:
                break
            messages = cuts.fewest_messages(bound, depths[-1])
            depth = min(depths, key=lambda each: messages[each - 1][0])
            batch = steady + 2 * float(messages[depth - 1][0])
            if batch < best:
                best, found = batch, cuts.traced(messages, bound, depth)
        return found


class _Cuts:
    """Cuts of a row of layers into stages, the last stage first."""

    def __init__(self, period: Floats, fits: list[Flags], hop: Floats) -> None:
        self._period, self._fits, self._hop, self.thinned = period, fits, hop, False

    def balanced(self, depth: int) -> tuple[int, ...] | None:
        """Return the cut with the shortest slowest period, and of those one with the fewest messages."""
        least = self._least_slowest(depth)[-1]
        if not math.isfinite(least):
            return None
        return self.traced(self.fewest_messages(least, depth), least, depth)

    def bounds(self, depths: list[int]) -> Iterator[float]:
        """Yield the periods that a fastest pipeline may have, ascending; some of them if they are too many."""
        least = min(self._least_slowest(depths[-1])[depths[0] - 1 :])
        if not math.isfinite(least):
            return
        known = np.unique(self._period[np.isfinite(self._period) & (self._period >= least)])
        most = max(_FEWEST_BOUNDS, int(_MOST_WORK / (self._period.size * depths[-1])))
        self.thinned = len(known) > most
        yield from (known[np.linspace(0, len(known) - 1, most).astype(int)] if self.thinned else known).tolist()

    def _least_slowest(self, deepest: int) -> list[float]:
        """Return the shortest slowest period by the number of stages."""
        reached = np.full(len(self._hop), np.inf)
        reached[-1], found = 0.0, list[float]()
        for fits in self._fits[:deepest]:
            reached = np.where(fits, np.maximum(self._period, reached[None, :]), np.inf).min(axis=1)
            found.append(float(reached[0]))
        return found

    def fewest_messages(self, bound: float, deepest: int) -> list[Floats]:
        """Return the least seconds of messages with periods up to a bound: by the number of stages, and first layer."""
        reached = np.full(len(self._hop), np.inf)
        reached[-1], found = 0.0, list[Floats]()
        for fits in self._fits[:deepest]:
            reached = self._onward(reached, fits, bound).min(axis=1)
            found.append(reached)
        return found

    def _onward(self, reached: Floats, fits: Flags, bound: float) -> Floats:
        """Return the seconds of messages behind each first layer, by the layer after the last of its stage."""
        return np.where(fits & (self._period <= bound), (reached + self._hop)[None, :], np.inf)

    def traced(self, messages: list[Floats], bound: float, depth: int) -> tuple[int, ...]:
        """Return the cut of the fewest messages."""
        cuts, ends = [0], np.full(len(self._hop), np.inf)
        ends[-1] = 0.0
        for left in range(depth, 0, -1):
            behind = messages[left - 2] if left > 1 else ends
            cuts.append(int(self._onward(behind, self._fits[left - 1], bound)[cuts[-1]].argmin()))
        return tuple(cuts)
