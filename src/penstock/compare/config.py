"""Configuration of a comparison: methods, seeds and learning rates, and the settings that all runs share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from penstock.checks import in_short, is_whole, no_option
from penstock.errors import ConfigError
from penstock.models.limits import LARGEST
from penstock.schedule.ir.in_flight import write_in_flight
from penstock.schedule.ir.limits import MOST_BATCHES, MOST_MICROBATCHES, MOST_STAGES
from penstock.schedule.ir.order import options_of as order_options
from penstock.schedule.methods.corrections import CORRECTIONS, options_of
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.written import (
    CORRECTION,
    RULE,
    Written,
    numbers_of,
    split_options,
    whole_numbers,
    written_order,
)
from penstock.schedule.orders import ORDERS
from penstock.train.config.load import apply_change, validate
from penstock.train.config.own_schedule import is_file, own_row, read_own_schedule, size_fault
from penstock.train.config.sections import OptimizerSection, RateSection
from penstock.train.config.values import MOST_DELAY, MOST_THREADS, Number, Strict

_MANY = 10**6  # seeds, and samples of a microbatch
SYNC, DELAYS = "sync", "delays"
"""Options of every method in a comparison: batches that 1f1b trains first, and updates that weights are late by."""
NO_SCHEDULES: Mapping[str, str] = MappingProxyType({})


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
        if is_file(text):
            written = written_order(text)
            if written.correction != written_order(name).correction:
                raise ConfigError(
                    f"schedules: {name!r}: of an order with a correction, the name says so, too: "
                    f"{name}:{CORRECTION}={written.correction}"
                )
            schedules[name] = read_own_schedule(written, config.stages, config.microbatches)
        if fault := size_fault(schedules[name], {"stages": config.stages, "microbatches": config.microbatches}):
            raise ConfigError(f"{name}: {fault}; all methods are compared with one size")
    named = [*(config.methods if "methods" in values or not own else ()), *(label for label, _, _ in own)]
    given_here = {"methods": named} if "methods" in values or own else {}
    return config.model_copy(update={"schedules": schedules, **given_here})


def _own_entry(file: str, rule: str | None, correction: str | None) -> tuple[str, str, str]:
    """Return the label of an order of one's own, its name, which is that of its file, and what is to be read."""
    path, options = split_options(file, (RULE, CORRECTION))
    ours = "".join(f":{option}={_written(options.pop(option))}" for option in (SYNC, DELAYS) if option in options)
    written = written_order(_with_options(path, options), rule, correction)
    choices = {name: value for name, value in ((RULE, written.rule), (CORRECTION, written.correction)) if value}
    said = _with_options("", {**written.options, **choices, **written.correcting})
    return f"{Path(path).name}{said}{ours}", f"{Path(path).name}{said}", f"{path}{said}"


def _with_options(name: str, options: Mapping[str, Written]) -> str:
    """Write options after a name: those of an order, its rule, its correction, the options of that, each sorted."""
    correcting = CORRECTIONS[str(options[CORRECTION])].options if options.get(CORRECTION) in CORRECTIONS else ()
    ordered = sorted(options, key=lambda option: (option in correcting, option == CORRECTION, option == RULE, option))
    return ":".join([name, *(f"{option}={_written(options[option])}" for option in ordered)])


def _listed(key: str, text: str, kind: type) -> list[Any]:
    """Parse a comma-separated list of numbers."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{key} takes comma-separated numbers, such as 1e-3,3e-3; got {text!r}") from None


@dataclass(frozen=True)
class Contender:
    """A method with its options, as one entry of a comparison.

    Attributes:
        method: its row in the table of methods.
        options: of its order, such as chunks=4, and of its correction, such as reschedule=100.
        sync: batches that 1f1b trains before it (PipeMare's T3, arXiv 1910.05124, section 3.3).
        delays: the number of updates by which all weights are delayed artificially, under a method that flushes.
        schedule: an order of one's own, as text; None for a method of the table.
    """

    method: Method
    options: tuple[tuple[str, Any], ...] = ()
    sync: int = 0
    delays: int = 0
    schedule: str | None = None

    @property
    def for_order(self) -> dict[str, Any]:
        """Return the options of the order: those that are no options of the correction.

        Raises:
            ConfigError: the order has no such option either, or the value is not a whole number.
        """
        others = {name: value for name, value in self.options if name not in self._corrections}
        known = order_options(ORDERS[self.method.order])
        for name in others:
            if name not in known:
                raise ConfigError(no_option(f"method {self.method.name}", name, [*known, *self._corrections]))
        return whole_numbers(others)

    @property
    def for_correction(self) -> dict[str, float | None]:
        """Return all options of the correction, with defaults where none are given."""
        given = {name: value for name, value in self.options if name in self._corrections}
        return options_of(self.method.correction, given)

    @property
    def _corrections(self) -> Collection[str]:
        return CORRECTIONS[self.method.correction].options

    @property
    def label(self) -> str:
        """The name with all options, such as "interleaved:chunks=4", which `parse_contender` can read."""
        ours = [(name, float(value)) for name, value in ((SYNC, self.sync), (DELAYS, self.delays)) if value]
        options = [*self.options, *ours]
        return ":".join([self.method.name, *(f"{name}={_written(value)}" for name, value in options)])


def parse_contender(text: str, schedules: Mapping[str, str] = NO_SCHEDULES) -> Contender:
    """Parse METHOD or METHOD:option=N:option=N.

    Args:
        text: as it is written.
        schedules: orders of one's own, as text, by what stands in the place of a method.

    Raises:
        ConfigError: unknown method, or options of another form.
    """
    name, options = split_options(text, (RULE, CORRECTION))
    ours = {}
    for option, means, limit in (
        (SYNC, "batches that 1f1b trains first", MOST_BATCHES),
        (DELAYS, "updates that weights are late by", MOST_DELAY),
    ):
        number = options.pop(option, 0)
        if not is_whole(number) or number > limit:
            raise ConfigError(
                f"methods: {text!r}: {option} is the number of {means}, at most {limit}; got {in_short(number)}"
            )
        ours[option] = number
    if all(ours.values()):
        raise ConfigError(f"methods: {text!r}: delays and sync cannot be combined; leave one of them out")
    own = _with_options(name, options)
    if own in schedules:
        written = written_order(own)
        correcting = written.correcting
        others = {option: value for option, value in options.items() if option not in correcting}
        row = replace(own_row(schedules[own], written.correction), name=_with_options(name, others))
        return Contender(row, tuple(sorted(correcting.items())), ours[SYNC], ours[DELAYS], schedules[own])
    for option, value in options.items():
        if isinstance(value, str):
            raise ConfigError(f"methods: {text!r}: {option}={value} is for an order of your own, given with --file")
    return Contender(find_method(name), tuple(sorted(numbers_of(options).items())), ours[SYNC], ours[DELAYS])


def _written(value: Written) -> str:
    return "null" if value is None else f"{value:.12g}" if isinstance(value, int | float) else write_in_flight(value)


def contenders(config: ComparisonConfig) -> list[Contender]:
    """Return the methods of a comparison, in the order given.

    Raises:
        ConfigError: see `parse_contender`; also if a method is given twice.
    """
    found = [parse_contender(text, config.schedules) for text in config.methods]
    labels = [contender.label for contender in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"methods: {twice} is given twice (perhaps under another name); name each method once")
    return found


def other_settings(config: ComparisonConfig) -> list[str]:
    """List settings of methods' papers that differ from the shared ones; `penstock train` would use the papers'."""
    found = []
    for contender in contenders(config):
        for key, value in contender.method.settings.items():
            section, _, name = key.partition(".")
            there = getattr(config.optimizer, name) if section == "optimizer" else value
            if there != value:
                found.append(f"{contender.label}: its paper has {key}={value}, here all methods have {there}")
    return found


class Key(NamedTuple):
    """Identifies one run of a comparison.

    Attributes:
        method: the contender's label.
        seed: of the initial weights and the order of samples.
        lr: peak learning rate.
    """

    method: str
    seed: int
    lr: float

    @property
    def file(self) -> str:
        """The name of the file with its results."""
        return f"{self.method.replace(':', '+')}-seed-{self.seed}-lr-{self.lr!r}.json"

    def __str__(self) -> str:
        return f"{self.method}, seed {self.seed}, lr {self.lr:g}"


def grid_of(config: ComparisonConfig) -> Iterator[Key]:
    """Yield every run that may be needed: all methods with all seeds and all rates."""
    labels = [contender.label for contender in contenders(config)]
    for seed in range(config.seeds):
        for lr in config.rates:
            for label in labels:
                yield Key(label, seed, lr)


def keys_of(config: ComparisonConfig, best: Callable[[str], float | None]) -> Iterator[Key]:
    """Yield all runs that are needed, seed by seed, so that early results compare all methods.

    Args:
        config: the comparison.
        best: label of a method -> its best rate, asked for when all rates have been tried; if it returns None, the
            method's further runs are left out.
    """
    tuned = config.tuned
    yield from (key for key in grid_of(config) if key.seed < tuned)
    labels = [contender.label for contender in contenders(config)]
    for seed in range(tuned, config.seeds):
        for label in labels:
            lr = best(label)
            if lr is not None:
                yield Key(label, seed, lr)
