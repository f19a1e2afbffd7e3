"""Checks everything that can be checked before a process starts, and has the plans of a run proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.comm.collective.control_plane import from_first
from penstock.comm.core.devices import find_device
from penstock.errors import ConfigError
from penstock.models.gpt_variant import LanguageModel
from penstock.options.all_options import PipelineOptions
from penstock.partition.blocks import named_blocks
from penstock.runtime.plan.plan import PipelinePlan, UnprovenPlan
from penstock.runtime.setup.shared_plan import Known, shared_plans
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.in_flight_choice import NO_LINKS_HERE
from penstock.schedule.ir.in_flight_option import write_in_flight
from penstock.simulate.auto_in_flight import later_with
from penstock.stage.cuda_graphs.recorder import check_records
from penstock.train.config.schema import TrainConfig
from penstock.train.data.corpus import Corpus, Once, load_corpus
from penstock.train.data.window_sampler import Windows
from penstock.train.prepare.phase_schedules import draft_phases, main_schedule, other_schedules, prove_phase
from penstock.train.setup.machine_memory import check_machine_memory, check_workers
from penstock.train.setup.model_shape import check_enough_blocks, model_of, model_shape
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.phase_plan import MAIN
from penstock.train.setup.pipeline_options import pipeline_options, tokens_per_batch
from penstock.train.setup.run_folder import is_of_a_run

ChooseRecompute = Callable[..., Any]
"""Called as `penstock.measure.recompute_choice.choose_for`, which this room cannot import.

Returns a choice with the attribute `recompute`, one word for each stage, and a text for people.
"""

Task = Callable[[TrainConfig], tuple[LanguageModel, Windows]]
"""Returns the model of a run, and its samples; of other models than a GPT, whatever has the same attributes."""


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        config: as the user gave it, with what was chosen in place of `recompute=auto`.
        model: its model, with the vocabulary of the data filled in.
        plan: of its pipeline, under its method.
        windows: the data.
        others: the plans under methods that go on before or after that one, by phase
            (`penstock.train.setup.phase_plan`).
        recompute: what was chosen so, and what follows from it, in words; empty if nothing was.
    """

    config: TrainConfig
    model: LanguageModel
    plan: PipelinePlan
    windows: Windows
    others: Mapping[str, PipelinePlan] = field(default_factory=dict)
    recompute: str = ""

    def plan_of(self, phase: str) -> PipelinePlan:
        """The plan under the method of a phase."""
        return self.others.get(phase, self.plan)

    def notes(self) -> list[str]:
        """Say what was chosen for this run."""
        found, parts = [], self.config.tensor_parallel
        if self.recompute:
            found.append(f"recompute: {self.recompute}")
        vocabulary = self.model.shape.vocabulary
        if vocabulary % parts:
            found.append(
                f"{vocabulary} tokens are no multiple of tensor_parallel {parts}, so embedding and head stay whole on "
                f"all processes; model.vocabulary={vocabulary + -vocabulary % parts} would divide them"
            )
        return found

    def about_in_flight(self) -> str:
        """Say by how much weights are read later with the microbatches in flight that are configured; empty if not.

        Or that `auto` finds no links, where one rank has all stages.
        """
        if self.plan.auto is not None and self.config.stages == 1:
            return NO_LINKS_HERE
        request = main_schedule(self.config)
        later = later_with(request) if isinstance(request, ScheduleRequest) else ""
        return later and f"{write_in_flight(self.config.options['in_flight'])}; {later}"

    @property
    def microbatches(self) -> int:
        """Of a batch, in all parallel pipelines together."""
        return self.config.width * self.config.microbatches

    @property
    def tokens_per_batch(self) -> int:
        """Of all parallel pipelines together."""
        return tokens_per_batch(self.config, self.model.shape)


def prepare(
    config: TrainConfig,
    *,
    local: bool = False,
    control: dist.ProcessGroup | None = None,
    once: Once = lambda look: look(),
    choose: ChooseRecompute | None = None,
    task: Task | None = None,
) -> Prepared:
    """Check a configuration against the method table, the model and the data; prove its schedules, which takes longest.

    Args:
        config: of the run.
        local: all of its processes will run on this machine, which must be able to hold them.
        control: a process group on the CPU, whose ranks call this together: rank 0 builds and proves the schedules for
            all; None to do it here.
        once: looks for the largest token, which takes reading all of them, once for all ranks; see `load_corpus`.
        choose: chooses what stages recompute, on rank 0 for all, where the configuration leaves it open (`auto`).
        task: makes the model and its samples; None for a GPT on the text that the configuration names.

    Raises:
        ConfigError: no such method, a shape that cannot be, too few blocks for the stages; or ranks have different
            plans.
        ScheduleError: the schedule cannot be built, or there are too few microbatches for it (the message names the
            smallest number).
        DataError: the text is missing, unreadable or too short.
        TransportError: a peer is dead.
    """
    if task is None:
        check_enough_blocks(config)
    _check_limit(config, choose)
    if local:
        check_workers(config)
    request, others = main_schedule(config), other_schedules(config)
    _check_meetings(config)
    if task is None:
        known = None if local else config.model.vocabulary  # the launcher looks through all tokens, for all ranks
        corpus = load_corpus(config.data, partial(is_of_a_run, Path(config.out)), known, once)
        if local:
            check_machine_memory(config, model_shape(config, corpus))
        task = partial(gpt_on_text, corpus=corpus)
    model, windows = task(config)
    if windows.corpus.text and config.sample_length and not config.prompt:
        raise ConfigError("prompt must not be empty while sample_length is not 0")
    options = pipeline_options(_decided(config), model)
    if local:
        _check_device(options)
    if config.evaluate.patience is not None and not options.deciding:
        raise ConfigError(
            "evaluate.patience needs stages that decide together, so that all end after the same batch; set "
            "max_grad_norm, or a width above 1"
        )
    drafts, said = partial(draft_phases, config, model, request, others), ""
    if choose is not None and config.recompute == "auto":
        sample, plans_with = windows.samples(0, config.microbatch_size), partial(_with_recompute, drafts, options)
        asked = named_blocks(model.blocks), sample, config.memory_limit, model.loss, optimizer_factory(config.optimizer)
        make, what = partial(_chosen, choose, plans_with, *asked), "choosing what to recompute"
        modes, said = make() if control is None else from_first(make, what, control)
        config, options = config.model_copy(update={"recompute": modes}), options.changed(recompute=tuple(modes))
    plans = shared_plans(partial(drafts, options), control, prove_phase, config.tensor_parallel)
    return Prepared(config, model, plans.pop(MAIN), windows, plans, said)


def gpt_on_text(config: TrainConfig, corpus: Corpus) -> tuple[LanguageModel, Windows]:
    """Return the model and the samples of a run on text.

    Raises:
        ConfigError: there is no such model, or the text holds other tokens than it has.
        DataError: the text is too short.
    """
    model = model_of(config, model_shape(config, corpus))
    return model, Windows(corpus, model.shape.context, config.held_out, config.seed, model.pair)


def _check_device(options: PipelineOptions) -> None:
    """Make sure that the devices of this machine have what is asked of them.

    Raises:
        ConfigError: there is no such device, or it lacks something.
    """
    device = find_device(options.run.device or "cpu")
    options.precision.kernels.check_device(device)
    if options.run.cuda_graphs:
        check_records(device)


def _decided(config: TrainConfig) -> TrainConfig:
    """A configuration without what is still to be chosen."""
    return config.model_copy(update={"recompute": "none"}) if config.recompute == "auto" else config


def _with_recompute(
    drafts: Callable[[PipelineOptions, Known], Mapping[str, UnprovenPlan]], options: PipelineOptions, recompute: Any
) -> list[PipelinePlan]:
    """The proven plans of all phases, given what stages recompute."""
    return [prove_phase(phase, draft) for phase, draft in drafts(options.changed(recompute=recompute), {}).items()]


def _chosen(choose: ChooseRecompute, *asked: Any) -> tuple[list[str], str]:
    """What stages recompute, and why."""
    found = choose(*asked)
    return list(found.recompute), str(found)


def _check_limit(config: TrainConfig, choose: ChooseRecompute | None) -> None:
    """Make sure that a limit of memory stands where something is chosen for it, and one thing only.

    Raises:
        ConfigError: the limit is missing, or what is chosen, or both are chosen.
    """
    auto = isinstance(config.options.get("in_flight"), str)
    if config.recompute == "auto" and auto:
        raise ConfigError(
            "recompute=auto fills memory_limit before it is known how many microbatches in flight "
            "options.in_flight=auto takes, whose activations would exceed it; give options.in_flight a number, or list "
            "what is recomputed"
        )
    if config.in_flight_bytes is not None and not auto:
        raise ConfigError("in_flight_bytes limits what options.in_flight=auto takes; set that, or leave it out")
    if config.recompute == "auto" and config.memory_limit is None:
        raise ConfigError(
            "recompute=auto needs memory_limit, the most bytes that a rank may hold, such as memory_limit=2e9"
        )
    if config.recompute == "auto":
        config.check_own_stages("recompute=auto", "which measures stages in one process")
    if config.recompute == "auto" and choose is None:
        raise ConfigError("recompute=auto is chosen by penstock train and verify; give none, block, stage or a list")
    if config.memory_limit is not None and config.recompute in ("none", "block", "stage"):
        raise ConfigError(
            f"memory_limit is what recompute=auto chooses by, but recompute is {config.recompute}; leave one of them "
            "out"
        )


def _check_meetings(config: TrainConfig) -> None:
    """Refuse counts of batches that do not go with meetings of parallel pipelines.

    Raises:
        ConfigError: what, and why.
    """
    combine = config.combine.chosen
    if not combine.apart:
        return
    kind, every = combine.kind, combine.every
    own = f"with combine.kind={kind} pipelines meet every {every} batches, and have weights of their own in between"
    if config.evaluate.patience is not None:
        raise ConfigError(f"evaluate.patience needs to hear of evaluations at once, but {own}; set it to null")
    for key, count in (("batches", config.batches), ("evaluate.every", config.evaluate.every)):
        if count is not None and count % every:
            raise ConfigError(f"{key} is {count}, but {own}; make it a multiple of {every}")
