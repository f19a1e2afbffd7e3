"""Configuration of a comparison: methods, seeds and learning rates, and the settings that all runs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from penstock.compare.contender import DELAYS, SYNC, write_options, written_value
from penstock.errors import ConfigError
from penstock.models.gpt_shape import LARGEST
from penstock.schedule.ir.limits import MOST_BATCHES, MOST_MICROBATCHES, MOST_STAGES
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method_parsing import (
    CORRECTION,
    OWN,
    RULE,
    split_options,
    written_order,
)
from penstock.train.config.load import apply_change, validate
from penstock.train.config.own_schedule import is_file, read_own_method, read_own_schedule, refuse_code, size_fault
from penstock.train.config.sections import OptimizerSection, RateSection
from penstock.train.config.values import MOST_THREADS, Number, Strict

_MANY = 10**6  # seeds, and samples of a microbatch


class NetSection(Strict):
    """The model of the task."""

    layers: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST["layers"],
        description="transformer layers or residual blocks; as many as stages if not set",
    )
    width: int | None = Field(
        default=None, ge=1, le=LARGEST["width"], description="model width (64), or channels of the first half (16)"
    )
    heads: int | None = Field(default=None, ge=1, le=LARGEST["heads"], description="attention heads of task text (4)")
    context: int | None = Field(
        default=None, ge=2, le=LARGEST["context"], description="tokens per sample of task text (64)"
    )


class ScoringSection(Strict):
    """Settings of the evaluations on held-out samples."""

    every: int = Field(
        default=25, ge=1, le=MOST_BATCHES, description="updates between two evaluations; there is one at the end, too"
    )
    samples: int = Field(
        default=256, ge=1, le=MOST_BATCHES, description="held-out samples; all there are, if these are fewer"
    )


class ComparisonConfig(Strict):
    """The configuration of a comparison."""

    methods: list[str] = Field(
        default=["1f1b", "2bw"],
        min_length=1,
        description="rows of `penstock methods`, as in interleaved:chunks=4 or 2bw:sync=50; names of schedules",
    )
    schedules: dict[str, str] = Field(
        default={}, description="orders of your own by the names of their files (--file), as text once they are read"
    )
    seeds: int = Field(default=3, ge=1, le=_MANY, description="runs of each method: seeds 0, 1, ...")
    lr: list[Annotated[Number, Field(gt=0)]] | None = Field(
        default=None, min_length=1, description="learning rates to try with each method; optimizer.lr if not set"
    )
    tune: int | None = Field(
        default=None,
        ge=1,
        le=_MANY,
        description="seeds that all rates are tried with; the others get what was best for a method. All if not set",
    )
    task: str = Field(default="text", description="text (a byte-level GPT) or digits (a residual CNN)")
    stages: int = Field(default=8, ge=1, le=MOST_STAGES, description="d, ranks of the pipeline")
    microbatches: int = Field(
        default=8, ge=1, le=MOST_MICROBATCHES, description="m, microbatches per batch (per update)"
    )
    microbatch_size: int = Field(default=4, ge=1, le=_MANY, description="samples per microbatch")
    batches: int = Field(default=300, ge=1, le=MOST_BATCHES, description="updates to make")
    max_grad_norm: Number | None = Field(
        default=None,
        gt=0,
        description="largest global norm of a gradient; null for none, so that no update waits for it",
    )
    spike: Number = Field(
        default=1.5,
        gt=1,
        le=1e100,
        description="a run has diverged when its loss is so many times that of the initial weights",
    )
    data: str | None = Field(
        default=None, description="text file, folder or token array of task text; the standard library if not set"
    )
    held_out: Number | None = Field(
        default=None, gt=0, le=0.5, description="fraction of the data held out (0.05 of text, 0.2 of digits)"
    )
    device: str = Field(default="auto", description="where runs train: auto (a GPU if there is one), cpu, cuda, cuda:1")
    cuda_graphs: bool = Field(
        default=False, description="record passes as CUDA graphs, so that the host issues each by one call"
    )
    compile: bool = Field(
        default=False,
        description="compile each block by torch.compile; on a CPU with a C++ compiler; changes the last bits",
    )
    threads: int = Field(
        default=1, ge=1, le=MOST_THREADS, description="threads to compute with; the number changes the last bits"
    )
    model: NetSection = Field(default=NetSection(), description="the model of the task")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="the optimizer")
    lr_schedule: RateSection = Field(default=RateSection(), description="the learning rate over time")
    evaluate: ScoringSection = Field(default=ScoringSection(), description="when held-out losses are taken")

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that every method is trained with."""
        return tuple(dict.fromkeys(map(float, self.lr or [self.optimizer.lr])))

    @property
    def tuned(self) -> int:
        """The number of seeds that are trained with all rates."""
        return self.seeds if self.tune is None else min(self.tune, self.seeds)

    @property
    def runs(self) -> int:
        """The number of runs of each method."""
        return self.tuned * len(self.rates) + self.seeds - self.tuned

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that all runs share: all but methods, seeds and rates."""
        values = self.model_dump()
        del values["optimizer"]["lr"]
        return {key: value for key, value in values.items() if key not in _OF_SOME_RUNS}


_OF_SOME_RUNS = ("methods", "schedules", "seeds", "lr", "tune")


def comparison_config(
    changes: Sequence[str],
    given: dict[str, Any],
    files: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    rule: str | None = None,
    correction: str | None = None,
) -> ComparisonConfig:
    """Make a checked configuration.

    Args:
        changes: `key=value`, as after --set.
        given: values of options of their own, which override `changes`; None where an option was not given.
        files: orders of one's own, with options after colons; they are compared after the methods that are given.
        values: of a configuration file, which all the others override.
        rule, correction: of those files that name none.

    Raises:
        ConfigError: lists every unknown key (with the nearest known one) and every value of a wrong type or range; also
            if a file cannot be read.
        ScheduleError: the schedule in a file is wrong.
    """
    values = dict(values or {})
    for text in dict(values.get("schedules") or {}).values():
        refuse_code(text, "the configuration")
    for change in changes:
        apply_change(ComparisonConfig, values, change)
    values |= {key: value for key, value in given.items() if value is not None}
    for key, kind in (("methods", str), ("lr", float)):
        if isinstance(values.get(key), str | float | int):
            values[key] = _listed(key, str(values[key]), kind)
    config = validate(ComparisonConfig, values)
    own = [_own_entry(file, rule, correction) for file in files]
    for key, value in ((RULE, rule), (CORRECTION, correction)):
        if value is not None and not files:
            row = find_method(split_options(config.methods[0])[0])
            raise ConfigError(f"{key}: method {row.name!r} has its own, {getattr(row, key)}; it is for a --file")
    schedules = {**config.schedules, **{name: read for _, name, read in own}}
    for name, text in schedules.items():
        if is_file(text) and (read := read_own_method(text, rule, correction)) is not None:
            schedules[name] = read[0]
        elif is_file(text):
            written = written_order(text)
            if written.correction != written_order(name).correction:
                raise ConfigError(
                    f"schedules: {name!r}: of an order with a correction, the name says so, too: "
                    f"{name}:{CORRECTION}={written.correction}"
                )
            schedules[name] = read_own_schedule(written, config.stages, config.microbatches)
        fault = size_fault(schedules[name], {"stages": config.stages, "microbatches": config.microbatches})
        if fault is not None:
            raise ConfigError(f"{name}: {fault}; all methods are compared with one size")
    named = [*(config.methods if "methods" in values or not own else ()), *(label for label, _, _ in own)]
    given_here = {"methods": named} if "methods" in values or own else {}
    return config.model_copy(update={"schedules": schedules, **given_here})


def _own_entry(file: str, rule: str | None, correction: str | None) -> tuple[str, str, str]:
    """Return the label of an order of one's own, its name, which is that of its file, and what is to be read."""
    path, options = split_options(file, OWN)
    ours = "".join(f":{option}={written_value(options.pop(option))}" for option in (SYNC, DELAYS) if option in options)
    if read_own_method(write_options(path, options), rule, correction) is not None:
        said = write_options("", options)
        return f"{Path(path).name}{said}{ours}", f"{Path(path).name}{said}", f"{path}{said}"
    written = written_order(write_options(path, options), rule, correction)
    choices = {name: value for name, value in ((RULE, written.rule), (CORRECTION, written.correction)) if value}
    said = write_options("", {**written.options, **choices, **written.correcting})
    return f"{Path(path).name}{said}{ours}", f"{Path(path).name}{said}", f"{path}{said}"


def _listed(key: str, text: str, kind: type) -> list[Any]:
    """Parse a comma-separated list of numbers."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{key} takes comma-separated numbers, such as 1e-3,3e-3; got {text!r}") from None
