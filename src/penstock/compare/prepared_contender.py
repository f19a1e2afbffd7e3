"""Prepares the contenders of a comparison: proves their schedules, checks their pipelines, simulates their timing."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.compare.config import ComparisonConfig, said_of
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.proof.proof import Proof
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Timeline
from penstock.train.prepare.build_pipeline import make_pipeline
from penstock.train.prepare.prepare_run import Prepared, Task, prepare
from penstock.train.setup.phase_plan import Course

FORWARD, BACKWARD = 1.0, 2.0
"""Times of one microbatch on a rank's whole share of the model in the simulation; messages and updates take none."""
_UPDATES = ("STEP", "VALIDATE")
_SIMULATED = 96  # batches


@dataclass(frozen=True)
class PreparedContender:
    """A contender that is ready to be trained."""

    label: str
    run: Prepared  # with the first seed and rate
    delays_forward: tuple[float, ...]  # of every stage, in updates, mean over a batch
    delays_backward: tuple[float, ...]
    times: tuple[float, ...]  # of every number of updates from 0 on, when the last stage has made them, simulated
    begin: Timeline  # of its first batches, simulated

    @property
    def synchronous(self) -> bool:
        """Whether every pass reads the newest weights, those of all pipelines."""
        late = any((*self.delays_forward, *self.delays_backward))
        return not late and not self.run.config.combine.chosen.apart


def prepare_contender(config: ComparisonConfig, label: str, task: Task) -> PreparedContender:
    """Check that a contender can be trained, and derive delays and simulated times from its schedule.

    Raises:
        PenstockError: it cannot; the message names the contender and the reason.
    """
    with said_of(label):
        run = prepare(config.run(label, 0, config.rates[0]), task=task)
        pipeline = make_pipeline(run)
    forward, backward = _chosen_delays(pipeline) if run.config.delayed else _delays(run.plan.proof)
    begin = simulate_schedule(run.plan.proof, _costs(run.plan.proof), min(run.config.batches, 3)).timeline
    return PreparedContender(label, run, forward, backward, _times(run), begin)


def _costs(proof: Proof) -> Costs:
    return Costs.uniform(proof.schedule, FORWARD, BACKWARD / 2, BACKWARD / 2)


def _times(run: Prepared) -> tuple[float, ...]:
    """Simulate when all stages have made each number of updates, under the methods that train them one by one."""
    course, times, batches = Course(run.config), [0.0], run.config.batches
    while (batch := len(times) - 1) < batches:
        proof, end = run.plan_of(course.phase(batch)).proof, int(min(course.end(batch), batches))
        times += [times[-1] + time for time in update_times(proof, _costs(proof), end - batch)[1:]]
    return tuple(times)


def _chosen_delays(pipeline: Pipeline) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the longest delay of forwards and of backwards of the blocks of each stage, where they are chosen."""
    forward, backward = (
        tuple(float(max(delays.get(block, 0) for block in blocks)) for blocks in pipeline.parts)
        for delays in (pipeline.delays, pipeline.backward_delays)
    )
    return forward, backward


def _delays(proof: Proof) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean delay of forwards and of backwards per stage, also over all ranks that hold the stage."""
    held = [
        [stage for stage in proof.schedule.stages if stage.index == index] for index in range(proof.schedule.num_stages)
    ]
    facts = [[proof.stages[stage].delay for stage in stages] for stages in held]
    forward = tuple(sum(delay.forward for delay in delays) / len(delays) for delays in facts)
    return forward, tuple(sum(delay.backward for delay in delays) / len(delays) for delays in facts)


def update_times(proof: Proof, costs: Costs, batches: int, limit: int = _SIMULATED) -> tuple[float, ...]:
    """Simulate when all stages have made each number of updates, from 0 to `batches`.

    If there are more than `limit` batches, the first and the last ones are simulated; each of those between takes as
    long as a batch in the middle of the simulation.

    Args:
        proof: of the schedule.
        costs: times of every stage.
        batches: the number of batches until the pipeline is drained.
        limit: an even number, several times the batches that a schedule takes to become periodic.
    """
    count = min(batches, limit)
    times = [0.0] * (count + 1)
    for interval in simulate_schedule(proof, costs, count).timeline.intervals:
        if interval.what in _UPDATES:
            times[interval.batch + 1] = max(times[interval.batch + 1], interval.end)
    more, half, few = batches - count, count // 2, max(count // 8, 1)
    if more:
        period = (times[half + few] - times[half - few]) / (2 * few)
        between = [times[half] + k * period for k in range(1, more + 1)]
        times = [*times[: half + 1], *between, *(time + more * period for time in times[half + 1 :])]
    return tuple(times)
