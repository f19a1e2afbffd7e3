"""Prepares the methods of a comparison: proves their schedules, checks their pipelines, simulates their timing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.compare.config import ComparisonConfig
from penstock.compare.contender import Contender
from penstock.compare.tasks import Task, TrialModel, trial_model
from penstock.errors import ConfigError, PenstockError
from penstock.options.all_options import PipelineOptions
from penstock.runtime.from_checked_plan import pipeline_of
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.proof.proof import Proof
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Timeline
from penstock.train.config.own_schedule import own_schedule
from penstock.train.setup.lr_schedule import rate_schedule
from penstock.train.setup.optimizers import check_hidden, optimizer_factory
from penstock.weights.corrections.registry import make_correction
from penstock.weights.optim.optimizer_factory import OptimizerFactory
from penstock.weights.updates.lr_scheduler_table import by_factor

FORWARD, BACKWARD = 1.0, 2.0
"""Times of one microbatch on a rank's whole share of the model in the simulation; messages and updates take none."""
OPENING = "1f1b"
"""The synchronous method that trains the first `sync` batches before an asynchronous one."""
_NO_DELAY = "sync: the method has no delay, so it is synchronous from the start; leave sync out"
_UPDATES = ("STEP", "VALIDATE")
_SIMULATED = 96  # batches


@dataclass(frozen=True)
class PreparedContender:
    """A method that is ready to be trained.

    Attributes:
        contender: which.
        model: that its pipeline trains.
        plan: of its pipeline.
        delays_forward, delays_backward: of every stage, updates between the weights that it reads and those
            that it updates, mean over a batch.
        times: of every number of updates from 0 on, when the last stage has made them, in the simulation.
        begin: the simulated timeline of its first batches.
        opening: the plan for the first `contender.sync` batches; None where there are none.
    """

    contender: Contender
    model: TrialModel
    plan: PipelinePlan
    delays_forward: tuple[float, ...]
    delays_backward: tuple[float, ...]
    times: tuple[float, ...]
    begin: Timeline
    opening: PipelinePlan | None = None

    @property
    def label(self) -> str:
        """The method's name with its options."""
        return self.contender.label

    @property
    def proof(self) -> Proof:
        """The proof of the schedule that its pipeline runs."""
        return self.plan.proof

    @property
    def synchronous(self) -> bool:
        """Whether every pass reads the newest weights."""
        return not any((*self.delays_forward, *self.delays_backward))


def prepare_contender(config: ComparisonConfig, task: Task, contender: Contender) -> PreparedContender:
    """Check that a method can be trained, and derive delays and simulated times from its schedule.

    Raises:
        PenstockError: it cannot; the message names the method and the reason.
    """
    try:
        model = trial_model(task, config.stages if contender.method.divides_head else None)
        plan, opening = _plans(config, task, model, contender)
        pipeline = make_trial_pipeline(model, plan, 0, make_optimizers(config, config.rates[0]))
        check_hidden(config.optimizer, pipeline.optimizers().values(), f"task {config.task}")
    except PenstockError as error:
        raise type(error)(f"{contender.label}: {error}") from None
    proof = plan.proof
    costs = Costs.uniform(proof.schedule, FORWARD, BACKWARD / 2, BACKWARD / 2)
    begin = simulate_schedule(proof, costs, min(config.batches, 3)).timeline
    forward, backward = (
        ((float(contender.delays),) * proof.schedule.num_stages,) * 2 if contender.delays else _delays(proof)
    )
    before = (0.0,) if opening is None else update_times(opening.proof, costs, contender.sync)
    after = update_times(proof, costs, config.batches - contender.sync)
    times = (*before, *(before[-1] + time for time in after[1:]))
    return PreparedContender(contender, model, plan, forward, backward, times, begin, opening)


def _plans(
    config: ComparisonConfig, task: Task, model: TrialModel, contender: Contender
) -> tuple[PipelinePlan, PipelinePlan | None]:
    """The plan of a method, and that of the batches before it, if there are any.

    Raises:
        PenstockError: the method cannot be trained, or cannot go on after these batches.
    """
    row, blocks = contender.method, model.blocks(0)
    _check_default_stages(config, len(blocks))
    if contender.sync and contender.sync >= config.batches:
        raise ConfigError(
            f"sync: {OPENING} would train the first {contender.sync} batches, but there are only {config.batches}; use "
            "a smaller sync, or more batches"
        )
    correction = make_correction(row.correction, contender.for_correction, config.batches, config.lr_schedule.warm_up)
    request: ScheduleRequest | Schedule
    if contender.schedule is not None:
        request = own_schedule(contender.schedule, row.spec.name)
    else:
        request = ScheduleRequest(row, config.stages, config.microbatches, options=contender.for_order)
    options = PipelineOptions().changed(
        lr_scheduler=by_factor(rate_schedule(config.lr_schedule, config.batches)),
        divisor=config.microbatches * config.microbatch_size * task.units,
        max_grad_norm=config.max_grad_norm,
        delays=contender.delays or None,
        balance=model.balance,
        device=config.device,
        cuda_graphs=config.cuda_graphs,
        compile=config.compile,
    )
    if not contender.sync:
        return PipelinePlan.make(blocks, request, options.changed(correction=correction)), None
    if row.divides_head:
        raise ConfigError(_NO_DELAY)
    first = UnprovenPlan.of(blocks, ScheduleRequest(OPENING, config.stages, config.microbatches), options)
    plan = first.followed_by(request, correction).prove()
    if not any((*_delays(plan.proof)[0], *_delays(plan.proof)[1])):
        raise ConfigError(_NO_DELAY)
    return plan, first.prove()


def _check_default_stages(config: ComparisonConfig, blocks: int) -> None:
    """Refuse the default number of stages where the model has fewer blocks, and say that it is the default.

    Raises:
        ConfigError: how many stages there may be.
    """
    if blocks < config.stages and "stages" not in config.model_fields_set:
        raise ConfigError(
            f"the model has {blocks} blocks, which cannot be cut into {config.stages} stages; {config.stages} is the "
            f"default of comparisons: give a number up to {blocks} (--stages {blocks}, or stages={blocks}), or a model "
            "with more layers"
        )


def make_trial_pipeline(model: TrialModel, plan: PipelinePlan, seed: int, optimizer: OptimizerFactory) -> Pipeline:
    """The pipeline of one run, all ranks in this process.

    Args:
        model: that it trains.
        plan: of the method, or of the batches before it.
        seed: of the initial weights, and of what blocks draw.
        optimizer: makes the optimizer of a stage.
    """
    seeded = replace(plan, options=plan.options.changed(seed=seed))
    return pipeline_of(seeded, model.blocks(seed), model.loss, optimizer)


def make_optimizers(config: ComparisonConfig, lr: float) -> OptimizerFactory:
    """Return a factory of the configured optimizer with another learning rate."""
    return optimizer_factory(config.optimizer.model_copy(update={"lr": lr}))


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
