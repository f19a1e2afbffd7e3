"""The schedules of a run's phases: those that a configuration asks for, drawn up as plans, and proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from penstock.errors import ConfigError, PenstockError
from penstock.models.gpt_variant import LanguageModel
from penstock.options.all_options import PipelineOptions
from penstock.partition.sequence_slices import Slicing, equal_time_lengths
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.setup.shared_plan import Known
from penstock.runtime.setup.tensor_division import check_steps_parts
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.wave_lags import record_fault, stage_place
from penstock.train.config.own_schedule import held_method, own_schedule
from penstock.train.config.schema import TrainConfig
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.phase_plan import FALLBACK, MAIN, SYNC
from penstock.weights.corrections.base import StagePlace
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.optimizer_adapters import check_averages
from penstock.weights.optim.undo import check_undoable


def main_schedule(config: TrainConfig) -> ScheduleRequest | Schedule:
    """Return the schedule that a configuration asks for.

    Raises:
        ConfigError: `undo` does not go with it, or a schedule of the user's own is none.
    """
    row, rule = config.row, None
    if config.schedule is not None and held_method(config.schedule) is None:
        return _own_schedule(config)
    if config.undo == "in-place":
        if not RULES[row.rule].provisional:
            raise ConfigError(f"undo=in-place: method {row.name!r} never takes an update back; leave undo out")
        rule = "provisional-in-place"
    return ScheduleRequest(
        row if config.method is None else row.name,
        config.stages,
        config.microbatches,
        rule,
        options=config.options,
        window=config.window,
    )


def _own_schedule(config: TrainConfig) -> Schedule:
    """The schedule of a user's own.

    Raises:
        ConfigError: its rule and its correction do not go together, or the rule needs one.
    """
    schedule = own_schedule(config.schedule or "", config.corrected_by)
    if config.undo == "in-place":
        raise ConfigError("undo=in-place: a schedule of your own says so itself, with rule provisional-in-place")
    return schedule


def other_schedules(config: TrainConfig) -> dict[str, ScheduleRequest]:
    """Return the schedules of the methods that go on before or after the main one, by phase.

    Raises:
        ConfigError: there is no such method, or it reads delayed weights.
    """
    wanted = {SYNC: config.sync.method} if config.sync.batches else {}
    if config.fallback.at is not None or config.fallback.when:
        wanted[FALLBACK] = config.fallback.method
    found = {}
    for phase, name in wanted.items():
        with _of_phase(phase):
            row = find_method(name)
        if not RULES[row.rule].flushes:
            raise ConfigError(
                f"{phase}.method must be synchronous, so that every batch reads all updates before it; {row.name!r} "
                "reads delayed weights. Take 1f1b or gpipe"
            )
        found[phase] = ScheduleRequest(row.name, config.stages, config.microbatches, window=config.window)
    return found


def draft_phases(
    config: TrainConfig,
    model: LanguageModel,
    request: ScheduleRequest | Schedule,
    others: Mapping[str, ScheduleRequest],
    options: PipelineOptions,
    known: Known,
) -> dict[str, UnprovenPlan]:
    """Return the plans of all phases, but for their proofs.

    Args:
        config: of the run.
        model: its model.
        request: its main schedule.
        others: those of other phases.
        options: of its pipeline.
        known: what another rank has found out of their schedules, by phase; empty if none has.

    Raises:
        ConfigError: something of the run does not go with one of these schedules.
        ScheduleError: one of them cannot be built.
    """
    draft = UnprovenPlan.of(model.blocks, request, options, known.get(MAIN))
    if draft.schedule.slices > 1:
        equal_times = Slicing(lengths=equal_time_lengths(1 / (12 * model.shape.width)))
        draft = replace(draft, options=options.changed(slicing=equal_times))
    _check_lags(config, draft.schedule)
    _check_optimizer(config, draft)
    drafts = {MAIN: draft}
    for phase, other in others.items():
        with _of_phase(phase):
            drafts[phase] = draft.followed_by(other, None, known.get(phase))
    return drafts


def prove_phase(phase: str, draft: UnprovenPlan) -> PipelinePlan:
    """Prove the schedule of a phase, whose name is said where it is not the main one."""
    with nullcontext() if phase == MAIN else _of_phase(phase):
        return draft.prove()


@contextmanager
def _of_phase(phase: str) -> Iterator[None]:
    """Say of what is wrong with the method of a phase that it is this one."""
    try:
        yield
    except PenstockError as error:
        raise ConfigError(f"{phase}.method: {error}") from None


def _check_lags(config: TrainConfig, schedule: Schedule) -> None:
    """Refuse lags that were recorded in another run than this one.

    Raises:
        ConfigError: what differs.
    """
    combine = config.combine.chosen
    places = (stage_place(pipeline, stage.name) for pipeline in range(config.width) for stage in schedule.stages)
    fault = record_fault(combine.lag, places, combine.every, config.batches)
    if fault is not None:
        raise ConfigError(f"combine.lag: {fault}")


def _check_optimizer(config: TrainConfig, draft: UnprovenPlan) -> None:
    """What every stage would find out later.

    Raises:
        CapabilityError: the optimizer is not installed, or does not go with something else.
    """
    make = optimizer_factory(config.optimizer)  # refuses one that is not installed
    schedule, correction = draft.schedule, draft.options.staleness.correction
    averages, parts = config.combine.optimizer_state == "average", config.tensor_parallel > 1
    if correction is None and not (config.undo == "in-place" or averages or parts):
        return  # the first optimizer of a process makes torch import its compiler, which takes a second
    optimizer = make([("block.weight", torch.nn.Parameter(torch.zeros(1, 1)))])
    if correction is not None:
        place = StagePlace(0, schedule.num_stages, schedule.microbatches, 1.0, f"method {schedule.name!r}")
        correction.on(Layout({}), place).begin(optimizer)
    if config.undo == "in-place":
        check_undoable(optimizer)
    check_averages(optimizer, averages)
    if parts:
        check_steps_parts(optimizer)
