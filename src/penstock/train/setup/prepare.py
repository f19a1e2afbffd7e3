"""Everything that can be checked before a process starts, and the folder of a run."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import yaml

from penstock.errors import ConfigError, PenstockError
from penstock.models.gpt import TIED_EMBEDDINGS, GPTConfig, gpt_blocks, preset
from penstock.partition.block_delays import resolve_both
from penstock.partition.blocks import cut_blocks
from penstock.runtime.setup.capabilities import check_correction, check_offered, check_slices
from penstock.runtime.setup.requirements import check_same_places
from penstock.schedule.build import extend, prove
from penstock.schedule.ir.rules import RULES, Source
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.table import correction_options, find_method
from penstock.schedule.methods.wave_lags import place_of, record_fault
from penstock.schedule.proof.check import Proof
from penstock.schedule.transforms.batch_ops import check_together
from penstock.schedule.transforms.recompute import with_recompute
from penstock.stage.autograd.recompute import check_segments
from penstock.stage.precision import low_precision
from penstock.train.config.schema import TrainConfig
from penstock.train.data.corpus import Corpus, load_corpus
from penstock.train.data.windows import Windows
from penstock.train.setup.optimizers import optimizer_factory
from penstock.train.setup.phase_plan import FALLBACK, SYNC
from penstock.train.setup.run_folder import saved_batches
from penstock.weights.corrections.base import Correction, StagePlace
from penstock.weights.corrections.registry import make_correction
from penstock.weights.memory.buffers import Layout
from penstock.weights.optim.adapters import check_averages
from penstock.weights.optim.undo import check_undoable

_MOMENT = "%Y-%m-%d-%H%M%S"
_RUN = re.compile(r"\d{4}-\d\d-\d\d-\d{6}-")  # names of run folders begin with the moment


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        config: as the user gave it.
        model: its shape, with the vocabulary of the data filled in.
        proof: of the schedule of its method.
        windows: the data.
        correction: of the method.
        others: the proofs of methods that go on before or after that one, by phase (`penstock.train.setup.phase_plan`).
    """

    config: TrainConfig
    model: GPTConfig
    proof: Proof
    windows: Windows
    correction: Correction | None = None
    others: Mapping[str, Proof] = field(default_factory=dict)

    def proof_of(self, phase: str) -> Proof:
        """That of the method of a phase."""
        return self.others.get(phase, self.proof)

    def correction_of(self, phase: str) -> Correction | None:
        """That of the method of a phase; synchronous ones have nothing to correct."""
        return None if phase in self.others else self.correction

    @property
    def microbatches(self) -> int:
        """Of a batch, in all parallel pipelines together."""
        return self.config.width * self.config.microbatches

    @property
    def tokens_per_batch(self) -> int:
        """Of all parallel pipelines together."""
        return self.microbatches * self.config.microbatch_size * self.model.context


def prepare(config: TrainConfig) -> Prepared:
    """Check a configuration against the method table, the model and the data.

    Raises:
        ConfigError: no such method, a shape that cannot be, too few blocks for the stages.
        ScheduleError: too few microbatches for the method (the message names the smallest number).
        DataError: the text is missing, unreadable or too short.
    """
    row = find_method(config.method)
    in_place = config.undo == "in-place"
    if in_place and not RULES[row.rule].provisional:
        raise ConfigError(f"undo=in-place: method {row.name!r} never takes an update back; leave undo out")
    rule = "provisional-in-place" if in_place else None
    proof = prove(row.name, config.stages, config.microbatches, options=config.options, rule=rule)
    check_together(proof.schedule, config.deciding, {0, proof.schedule.num_stages - 1} if config.model.tied else ())
    others = _other_proofs(config, proof)
    _check_recompute(config, [proof, *others.values()])
    _check_combine(config, proof.schedule, row.correction)
    corpus = load_corpus(config.data, partial(is_of_a_run, Path(config.out)))
    model = model_shape(config, corpus)
    blocks = gpt_blocks(model, config.seed)
    cut_blocks(blocks, proof.schedule.num_stages, config.balance)
    tied = TIED_EMBEDDINGS if config.model.tied else {}
    resolve_both(config.delays, config.backward_delays, blocks, tied, proof.schedule, config.recompute)
    windows = Windows(corpus, model.context, config.held_out, config.seed)
    if corpus.text and config.sample_length and not config.prompt:
        raise ConfigError("prompt must not be empty while sample_length is not 0")
    if config.evaluate.patience is not None and not config.decides:
        raise ConfigError(
            "evaluate.patience needs stages that decide together, so that all end after the same batch; set clip, or "
            "a width above 1"
        )
    check_slices(proof.schedule, config.recompute)
    options = correction_options(row, config.correction)
    correction = make_correction(row.correction, options, config.batches, config.rate.warm_up)
    check_correction(proof.schedule, correction, low_precision(config.precision), config.recompute, config.model.tied)
    _check_optimizer(
        config, correction, StagePlace(0, proof.schedule.num_stages, config.microbatches, 1.0, f"method {row.name!r}")
    )
    return Prepared(config, model, proof, windows, correction, others)


def _check_optimizer(config: TrainConfig, correction: Correction | None, place: StagePlace) -> None:
    """What every stage would find out later.

    Raises:
        CapabilityError: the optimizer is not installed, or does not go with something else.
    """
    optimizer = optimizer_factory(config.optimizer)([("block.weight", torch.nn.Parameter(torch.zeros(1, 1)))])
    if correction is not None:
        correction.on(Layout({}), place).begin(optimizer)
    if config.undo == "in-place":
        check_undoable(optimizer)
    check_averages(optimizer, config.combine.optimizer_state == "average")


def _other_proofs(config: TrainConfig, proof: Proof) -> dict[str, Proof]:
    """Those of the methods that go on before or after the main one."""
    wanted = {SYNC: config.sync.method} if config.sync.batches else {}
    if config.fallback.at is not None or config.fallback.when:
        wanted[FALLBACK] = config.fallback.method
    if wanted and config.delayed:
        raise ConfigError("delays: they are of one schedule alone; leave out sync and fallback, or delays")
    if config.fallback.when and not config.decides:
        raise ConfigError(
            "fallback.when needs stages that decide together, so that all see the same divergence; set clip, or a "
            "width above 1"
        )
    found = {}
    for section, name in wanted.items():
        row = find_method(name)
        if RULES[row.rule].forward is not Source.BATCH:
            raise ConfigError(
                f"{section}.method must be synchronous, so that every batch reads all updates before it; {row.name!r} "
                "reads delayed weights. Take 1f1b or gpipe"
            )
        try:
            found[section] = prove(row.name, config.stages, config.microbatches)
            check_same_places(proof.schedule, found[section].schedule)
        except PenstockError as error:
            raise ConfigError(f"{section}.method: {error}") from None
    return found


def _check_recompute(config: TrainConfig, proofs: Iterable[Proof]) -> None:
    """Refuse recomputes of stages, or of segments of them, that do not go with a method.

    Raises:
        ConfigError: nothing is recomputed in segments, or there are not as many stages.
        PenstockError: the order, or its rule, is not one for them.
    """
    check_segments(config.recompute, config.segments)
    for proof in proofs if config.recompute == "stage" else ():
        if config.segments == 1 and not proof.schedule.recomputed:
            with_recompute(proof.schedule)
        elif config.segments != 1:
            check_offered(extend(proof, recomputes=True, segments=config.segments).schedule)


def _check_combine(config: TrainConfig, schedule: Schedule, correction: str) -> None:
    """Refuse what does not go with the way in which parallel pipelines agree.

    Raises:
        ConfigError: what, and why.
    """
    combine = config.combine.chosen
    if not combine.apart:
        return
    kind, every = combine.kind, combine.every
    fault = combine.fault(
        schedule,
        config.width,
        correction,
        tied=config.model.tied and schedule.num_stages > 1,
        fast=config.reduce == "fast",
        delayed=config.delayed,
    )
    if fault is None:
        places = (place_of(r, stage.name) for r in range(config.width) for stage in schedule.stages)
        recorded = record_fault(combine.lag, places, every, config.batches)
        fault = None if recorded is None else f"combine.lag: {recorded}"
    own = f"with combine.kind={kind} pipelines meet every {every} batches, and have weights of their own in between"
    if fault is None and config.average is not None:
        fault = (
            f"average={config.average} would be of each pipeline's own weights with combine.kind={kind}; leave it out"
        )
    if fault is None and config.phased:
        fault = f"{own}, which sync and fallback do not know how to leave; leave these out"
    if fault is None and config.evaluate.patience is not None:
        fault = "evaluate.patience needs to hear of evaluations at once, but " + own + "; set it to null"
    for key, count in (("batches", config.batches), ("evaluate.every", config.evaluate.every)):
        if fault is None and count is not None and count % every:
            fault = f"{key} is {count}, but {own}; make it a multiple of {every}"
    if fault is not None:
        raise ConfigError(fault)


def model_shape(config: TrainConfig, corpus: Corpus) -> GPTConfig:
    """The GPT's shape: the preset with what the configuration changes."""
    section = config.model
    changes = {name: getattr(section, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
    changes["vocabulary"] = changes["vocabulary"] or corpus.vocabulary
    if changes["vocabulary"] < corpus.vocabulary:
        raise ConfigError(
            f"model.vocabulary is {changes['vocabulary']}, but {corpus.name} holds tokens up to {corpus.vocabulary - 1}"
        )
    return preset(section.preset, **{name: value for name, value in changes.items() if value is not None})


def make_run_folder(config: TrainConfig) -> Path:
    """A new folder for a run, with the configuration in it.

    Raises:
        ConfigError: it cannot be made.
    """
    now = datetime.datetime.now().strftime(_MOMENT)
    base = Path(config.out) / f"{now}-{config.method}-{_shape(config)}"
    folder, number = base, 1
    try:
        while True:
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
                folder = base.with_name(f"{base.name}-{number}")
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"cannot make a run folder in {config.out!r}: {error.strerror or error}") from None
    return folder


def check_resume(config: TrainConfig, run: Path) -> None:
    """Refuse to go on with a run that is further than the configuration wants it; its own end can be made again.

    Raises:
        ConfigError: how far it is.
    """
    batch = saved_batches(run)
    if batch is not None and batch > config.batches:
        raise ConfigError(
            f"the run in {str(run)!r} has {batch} batches already; set batches above that, got {config.batches}"
        )


def is_of_a_run(out: Path, file: Path) -> bool:
    """Whether a file lies in a run folder in `out`; trained on its own records, a run would change its text."""
    try:
        within = file.resolve().relative_to(out.resolve())
    except ValueError:
        return False
    return _RUN.match(within.parts[0]) is not None


def _shape(config: TrainConfig) -> str:
    """Stages and microbatches, and how many pipelines if there are several."""
    return "x".join(map(str, [*([config.width] if config.width > 1 else []), config.stages, config.microbatches]))


def describe_model(model: GPTConfig) -> dict[str, int]:
    """A GPT's shape as plain values, for the index of saved weights."""
    return asdict(model)
