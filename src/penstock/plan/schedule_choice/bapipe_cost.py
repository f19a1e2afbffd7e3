"""The cost function of BaPipe's planner (Zhao et al., arXiv 2012.12544): closed forms, one for each schedule.

The paper chooses schedule and cut together, by the times of compute and of messages, and by memory. Of its schedules
those are here that devices follow which run one pass at a time, as GPUs do. Stage i of N takes t_i for the forward and
the backward of a microbatch, and a message over the border after it takes c_i, either way. A batch of M microbatches
takes

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
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.layer_row import border_bytes_of
from penstock.plan.stages.piper_cost import way_named
from penstock.plan.stages.planned import PlannedStage, Rating, StageRating
from penstock.plan.stages.two_bw_cost import bandwidths


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
        """Return what a plan costs with its best schedule, per microbatch: the time of a batch over M."""
        if any(stage.tensor != 1 or stage.inner for stage in stages):
            return self.refused("its stages are not on single devices")
        if len(stages) > 1 and any(stage.replicas > 1 for stage in stages):
            return self.refused("its stages have replicas")
        return self.rate_with(stages, self.schedule_of(stages))

    def schedule_of(self, stages: tuple[PlannedStage, ...]) -> MessageSchedule:
        """Return the fastest schedule that fits."""
        return min(SCHEDULES, key=lambda schedule: self.rate_with(stages, schedule).seconds)

    def rate_with(self, stages: tuple[PlannedStage, ...], schedule: MessageSchedule) -> Rating:
        """Return what a plan costs with one schedule."""
        m, width = self.microbatches, stages[0].replicas
        across, along = bandwidths(self.devices, width, len(stages))
        hops = [size / along for size in border_bytes_of(self.graph, stages)]
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
        ways = [way_named(self.graph, number, 1, "") for number in stage.layers]
        compute = sum(way.seconds for way in ways) / stage.replicas
        links = max(hops) if schedule.overlapped else sum(hops)
        flight = schedule.in_flight(left, self.microbatches // stage.replicas or 1)
        memory = sum(way.memory + flight * way.memory_per_microbatch for way in ways)
        period = max(compute, links) if schedule.overlapped else compute + links
        return StageRating(period, {"compute": compute, "links": links}, memory)
