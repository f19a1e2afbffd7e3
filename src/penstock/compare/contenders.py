"""The methods of a comparison, each with a pipeline that can be made, and what its schedule says about it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.compare.config import ComparisonConfig, Contender
from penstock.compare.tasks import Task
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.setup.requirements import check_same_places
from penstock.schedule.build import prove
from penstock.schedule.proof.check import Proof
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Timeline
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import check_hidden, optimizer_factory
from penstock.weights.corrections.base import Correction
from penstock.weights.corrections.registry import make_correction
from penstock.weights.optim.updater import OptimizerFactory

FORWARD, BACKWARD = 1.0, 2.0
"""Times of a rank's whole share of the model for one microbatch, in the simulation; messages and updates take none."""
OPENING = "1f1b"
"""The method of the batches before one that is not synchronous, where there are such."""
_UPDATES = ("STEP", "VALIDATE")
_SIMULATED = 96  # batches


@dataclass(frozen=True)
class Entrant:
    """A method that can be trained.

    Attributes:
        contender: which.
        proof: of the schedule that its pipeline runs.
        correction: what is done about staleness.
        delays_forward, delays_backward: of every stage, updates between the weights that it reads and those
            that it updates, mean over a batch.
        times: of every number of updates from 0 on, when the last stage has made them, in the simulation.
        begin: the simulated timeline of its first batches.
        opening: the proof of the schedule of the first `contender.sync` batches; None where there are none.
    """

    contender: Contender
    proof: Proof
    correction: Correction | None
    delays_forward: tuple[float, ...]
    delays_backward: tuple[float, ...]
    times: tuple[float, ...]
    begin: Timeline
    opening: Proof | None = None

    @property
    def label(self) -> str:
        """What it is called."""
        return self.contender.label

    @property
    def synchronous(self) -> bool:
        """Whether every pass reads the newest weights."""
        return not any((*self.delays_forward, *self.delays_backward))


def enter(config: ComparisonConfig, task: Task, contender: Contender) -> Entrant:
    """Make sure that a method can be trained, and derive what its schedule says.

    Raises:
        PenstockError: it cannot; the message says why, and of which method.
    """
    try:
        row = contender.method
        correction = make_correction(row.correction, contender.for_correction, config.batches, config.rate.warm_up)
        plain = prove(row.name, config.stages, config.microbatches, options=contender.for_order)
        pipeline = make_pipeline(config, task, plain, correction, 0, config.rates[0], delays=contender.delays)
        check_hidden(config.optimizer, pipeline.optimizers().values(), f"task {config.task}")
        proof = pipeline.proof
        opening = _opening(config, task, contender, proof)
    except PenstockError as error:
        raise type(error)(f"{contender.label}: {error}") from None
    costs = Costs.uniform(proof.schedule, FORWARD, BACKWARD / 2, BACKWARD / 2)
    begin = simulate_schedule(proof, costs, min(config.batches, 3)).timeline
    forward, backward = (
        ((float(contender.delays),) * proof.schedule.num_stages,) * 2 if contender.delays else _delays(proof)
    )
    before = (0.0,) if opening is None else update_times(opening, costs, contender.sync)
    after = update_times(proof, costs, config.batches - contender.sync)
    times = (*before, *(before[-1] + time for time in after[1:]))
    return Entrant(contender, proof, correction, forward, backward, times, begin, opening)


def _opening(config: ComparisonConfig, task: Task, contender: Contender, proof: Proof) -> Proof | None:
    """What trains the first batches.

    Raises:
        PenstockError: the method cannot go on after it.
    """
    if not contender.sync:
        return None
    if contender.sync >= config.batches:
        raise ConfigError(
            f"sync: all of the {config.batches} batches would be trained by {OPENING}, which is to train the first "
            f"{contender.sync}; take fewer of these, or more batches"
        )
    if not any((*_delays(proof)[0], *_delays(proof)[1])):
        raise ConfigError("sync: the method has no delay, so it is synchronous from the start; leave sync out")
    plain = prove(OPENING, config.stages, config.microbatches)
    check_same_places(plain.schedule, proof.schedule)
    return make_pipeline(config, task, plain, None, 0, config.rates[0]).proof


def make_pipeline(
    config: ComparisonConfig,
    task: Task,
    proof: Proof,
    correction: Correction | None,
    seed: int,
    lr: float,
    optimizer: OptimizerFactory | None = None,
    delays: int = 0,
) -> Pipeline:
    """The pipeline of one run, all ranks in this process.

    Args:
        config: of the comparison.
        task: model and data.
        proof: of the method's schedule.
        correction: of the method.
        seed: of the initial weights, and of what blocks draw.
        lr: peak learning rate.
        optimizer: what makes the optimizer of a stage; as configured, with this rate, if None.
        delays: by how many updates all weights are late, beyond what the schedule says.
    """
    return Pipeline(
        task.blocks(seed),
        proof,
        loss=task.loss,
        optimizer=optimizer or make_optimizers(config, lr),
        rate=rate_schedule(config.rate, config.batches),
        divisor=config.microbatches * config.microbatch_size * task.units,
        clip=config.clip,
        seed=seed,
        correction=correction,
        delays=delays or None,
    )


def make_optimizers(config: ComparisonConfig, lr: float) -> OptimizerFactory:
    """The optimizers as configured, with a learning rate of their own."""
    return optimizer_factory(config.optimizer.model_copy(update={"lr": lr}))


def _delays(proof: Proof) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of every stage, in forward and backward; where several ranks hold it, their mean."""
    held = [
        [stage for stage in proof.schedule.stages if stage.index == index] for index in range(proof.schedule.num_stages)
    ]
    facts = [[proof.stages[stage].delay for stage in stages] for stages in held]
    forward = tuple(sum(delay.forward for delay in delays) / len(delays) for delays in facts)
    return forward, tuple(sum(delay.backward for delay in delays) / len(delays) for delays in facts)


def update_times(proof: Proof, costs: Costs, batches: int, limit: int = _SIMULATED) -> tuple[float, ...]:
    """When all stages have made so many updates, from 0 to `batches`.

    Of more than `limit` batches the first and the last ones are simulated, and those between them take what one of them
    takes in the midst of a simulation.

    Args:
        proof: of the schedule.
        costs: times of every stage.
        batches: how many there are until the pipeline is drained.
        limit: even, and a few times what it takes until a schedule repeats itself.
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
