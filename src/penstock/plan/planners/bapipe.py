"""BaPipe's planner (Zhao et al., arXiv 2012.12544): the schedule and a balanced cut, chosen together.

The cost is a closed form for each schedule. Of the paper's schedules those are here that devices follow which run one
pass at a time, as GPUs do. Stage i of N takes t_i for the forward and the backward of a microbatch, and a message over
the border after it takes c_i, either way. A batch of M microbatches takes

    sum of t_i  +  2 sum of c_i  +  (M - 1) max over i of p_i,

where p_i is the period of a stage:

- "1f1b-sno": messages are not overlapped. After each pass a stage exchanges messages with a neighbour, an activation
  for a gradient, so p_i = t_i + c_(i-1) + c_i. It holds N - i microbatches, counted from i = 0.
- "1f1b-so": messages are overlapped, for which twice as many microbatches are in flight: p_i = max(t_i, c_(i-1), c_i),
  and a stage holds 2 (N - i).

For equal stages these are (M + N - 1) (F + B), plus 2 (M + N - 2) c or 2 (N - 1) c. No stage holds more than M. One
stage may have r replicas, data parallelism: M / r microbatches each, and a ring of 2 (r - 1) / r of the parameters. The
forms for unequal stages are our reading, and so is that a border counts whatever passes it. Of the paper's means of
balance, the division of one layer between two devices is left out.

As published, all devices are used. For each schedule the cut is balanced: of those that fit, the slowest period is as
short as can be, and then messages are as few as can be; closed forms decide between the schedules and data parallelism.
A balanced cut is not the fastest one, since messages also take time while the pipeline fills and drains.
`plan_for_bapipe_cost` finds the fastest of all cuts, on any number of devices: for each bound on the period it makes
messages as few as can be. Layers are cut along one topological order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.plan.planners.two_bw import widths
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost, bandwidths, held
from penstock.plan.stages.layer_row import (
    Floats,
    between,
    border_bytes,
    depths_by_link,
    later,
    row_notes,
    row_stages,
    running_sums,
    single_device_options,
)
from penstock.plan.stages.planned import Plan, PlannedStage, Rating, Search, StageRating

Flags = npt.NDArray[np.bool_]

_MOST_WORK = 2e9  # cells of the dynamic programs of one schedule
_FEWEST_BOUNDS = 16  # that are tried at least, where periods are many
_THINNED = "only some bounds on the period were tried: the best that was found, not proven to be the best there is"


class MessageSchedule(NamedTuple):
    """A schedule by what it does about messages.

    Attributes:
        name: as in the paper.
        overlapped: whether messages are sent during passes.
    """

    name: str
    overlapped: bool

    def in_flight(self, left: int, microbatches: int) -> int:
        """Return how many microbatches a stage holds with which so many are left in the pipeline, itself included."""
        return min((2 if self.overlapped else 1) * left, microbatches)


SCHEDULES = (MessageSchedule("1f1b-sno", overlapped=False), MessageSchedule("1f1b-so", overlapped=True))


class BaPipeCost(GraphCost):
    """Rates pipelines of single devices, and data parallelism. Of links up to two speeds count."""

    name = "bapipe"

    def rate(self, stages: tuple[PlannedStage, ...]) -> Rating:
        """Return what a plan costs with the fastest schedule that fits."""
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return self.refused("its stages are not on single devices")
        if len(stages) > 1 and any(stage.replicas > 1 for stage in stages):
            return self.refused("its stages have replicas")
        return min((self.rate_with(stages, each) for each in SCHEDULES), key=lambda rating: rating.seconds)

    def rate_with(self, stages: tuple[PlannedStage, ...], schedule: MessageSchedule) -> Rating:
        m, width = self.microbatches, stages[0].replicas
        across, along = bandwidths(self.devices, width, len(stages))
        hops = [size / along for size in self.border_bytes(stages)]
        faults = [f"{m} microbatches cannot be divided over {width} replicas"] if m % width else []
        ratings = [
            self._stage(stage, (hops[at], hops[at + 1]), schedule, len(stages) - at) for at, stage in enumerate(stages)
        ]
        if width > 1:
            sums = 2 * (width - 1) / width * sum(layer.parameters for layer in self.graph.layers) / across / m
            (one,) = ratings
            both = one.parts | {"gradient sums": sums}
            ratings = [StageRating(one.seconds + sums, both, one.memory)]
            return self.rating(ratings, width, lambda: ratings[0].seconds, faults)
        compute = sum(rating.parts["compute"] for rating in ratings)
        batch = compute + 2 * sum(hops) + (m - 1) * max(rating.seconds for rating in ratings)
        return self.rating(ratings, len(stages), lambda: batch / m, faults)

    def _stage(
        self, stage: PlannedStage, hops: tuple[float, float], schedule: MessageSchedule, left: int
    ) -> StageRating:
        """Return the period of a stage with messages of so many seconds on either side, and what it holds."""
        ways = self.ways(replace(stage, ways=()))
        compute = sum(way.seconds for way in ways) / stage.replicas
        links = max(hops) if schedule.overlapped else sum(hops)
        flight = schedule.in_flight(left, self.microbatches // stage.replicas or 1)
        period = max(compute, links) if schedule.overlapped else compute + links
        return StageRating(period, {"compute": compute, "links": links}, held(ways, flight))


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
            between(running_sums(getattr(way, key) for way in first))
            for key in ("seconds", "memory", "memory_per_microbatch")
        )

    def answer(self, plans: list[Plan]) -> Search:
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
                notes = (f"schedule {schedule.name}", *row_notes(self._graph)) if len(stages) > 1 else ()
                notes += (_THINNED,) if cuts.thinned else ()
                yield Plan(BaPipeCost.name, stages, self._cost.rate_with(stages, schedule), notes)

    def _period(self, schedule: MessageSchedule, bandwidth: float) -> Floats:
        """Return the periods of all stages: (first layer, layer after the last)."""
        hop = self._border / bandwidth
        if schedule.overlapped:
            period = np.maximum(self._compute, np.maximum(hop[:, None], hop[None, :]))
        else:
            period = self._compute + hop[:, None] + hop[None, :]
        return np.where(later(period), period, np.inf)

    def _fits(self, schedule: MessageSchedule, deepest: int) -> list[Flags]:
        """Return which stages fit, by the stages left in the pipeline."""
        if self._always.size * deepest > _MOST_WORK / _FEWEST_BOUNDS:
            raise ConfigError(
                f"planner 'bapipe' would look at too many cuts of {len(self._always) - 1} layers into {deepest} "
                "stages; merge layers, or plan for fewer devices"
            )
        flights = (schedule.in_flight(left, self._m) for left in range(1, deepest + 1))
        return [self._always + flight * self._each <= self._cost.limit for flight in flights]

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
