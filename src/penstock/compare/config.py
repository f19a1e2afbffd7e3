"""Configuration of a comparison: that of `penstock train`, and what its contenders, seeds and rates change in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from penstock.errors import ConfigError, PenstockError
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method_parsing import CORRECTION, METHOD, OWN, RULE
from penstock.train.config.key_reference import Key, described_keys, known_keys
from penstock.train.config.load import (
    apply_change,
    validate,
    with_method_options,
    with_own_method,
    with_own_schedule,
)
from penstock.train.config.own_schedule import refuse_code
from penstock.train.config.schema import TrainConfig
from penstock.train.config.values import MANY, Number
from penstock.train.config.written_config import flat_config

_OF_A_RUN = ("method", "schedule", "rule", "corrected_by", "seed", "out", "placement", "predicted")
"""Keys of `penstock train` that a comparison sets itself, or has no use for."""
_OF_METHOD = ("method", "schedule", "rule", "corrected_by", "options", "correction")
"""Keys that are other ones once a file has been read."""
_OF_ALL = ("seed", "data", "out")
"""Keys that contenders cannot change, or their results would not be comparable."""
_SHORT = MappingProxyType({"sync": "sync.batches"})
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "stages": 8,
        "microbatches": 8,
        "microbatch_size": 4,
        "batches": 300,
        "max_grad_norm": None,
        "threads": 1,
        "sample_length": 0,
        "evaluate": {"every": 25, "samples": 256},
        "checkpoint": {"every": None},
        "model": {"width": 64, "heads": 4, "context": 64},
    }
)
"""The defaults of comparisons where they are not those of a run."""


class ComparisonConfig(TrainConfig):
    """The configuration of a comparison: what its runs have in common, and how they differ."""

    methods: list[str] = Field(
        default=[],
        description="contenders in short: rows of `penstock methods`, with options and with keys that they change, as "
        "in interleaved:chunks=4 or 2bw:sync.batches=50; 1f1b and 2bw if none is named",
    )
    contenders: dict[str, dict[str, Any]] = Field(
        default={}, description="contenders by name, with keys that they change, as in {late: {method: 2bw, delays: 2}}"
    )
    seeds: int = Field(default=3, ge=1, le=MANY, description="runs of each contender: seeds 0, 1, ...")
    lr: list[Annotated[Number, Field(gt=0)]] | None = Field(
        default=None, min_length=1, description="learning rates to try with each contender; optimizer.lr if not set"
    )
    tune: int | None = Field(
        default=None,
        ge=1,
        le=MANY,
        description="seeds that all rates are tried with; the others get what was best for a contender. All if not set",
    )
    spike: Number = Field(
        default=1.5,
        gt=1,
        le=1e100,
        description="a run has diverged when its loss is so many times that of its first batch",
    )

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that every contender is trained with."""
        return tuple(dict.fromkeys(map(float, self.lr or [self.optimizer.lr])))

    @property
    def tuned(self) -> int:
        """The number of seeds that are trained with all rates."""
        return self.seeds if self.tune is None else min(self.tune, self.seeds)

    @property
    def runs(self) -> int:
        """The number of runs of each contender."""
        return self.tuned * len(self.rates) + self.seeds - self.tuned

    def run(self, label: str, seed: int, lr: float) -> TrainConfig:
        """Return the configuration of one run.

        Raises:
            ConfigError: a contender changes a key that there is not, or that all runs share.
        """
        changes = self.contenders[label]
        for key in _OF_ALL:
            if key in changes:
                raise ConfigError(f"{key}: all contenders have the same; leave it out")
        if "lr" in changes.get("optimizer", {}):
            raise ConfigError("optimizer.lr: rates are tried with all contenders (--lr); leave it out")
        values = self.model_dump(include={*TrainConfig.model_fields})
        return validate(TrainConfig, _merged(values, changes, {"seed": seed, "optimizer": {"lr": lr}}))


def comparison_keys() -> list[Key]:
    """List every key of a comparison with its default and its meaning."""
    defaults = flat_config(validate(ComparisonConfig, _with_defaults({})))
    return [
        (key, defaults[key], meaning)
        for key, _, meaning in described_keys(ComparisonConfig)
        if key.partition(".")[0] not in _OF_A_RUN
    ]


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
        files: orders and methods of one's own, with options after colons; they come after the methods that are given.
        values: of a configuration file, which all the others override.
        rule, correction: of those files that name none.

    Raises:
        ConfigError: lists every unknown key (with the nearest known one) and every value of a wrong type or range; also
            if a file cannot be read.
        ScheduleError: the schedule in a file is wrong.
    """
    values = copy.deepcopy(dict(values or {}))
    for change in changes:
        apply_change(ComparisonConfig, values, change)
    values |= {key: value for key, value in given.items() if value is not None}
    for key in _OF_A_RUN:
        if key in values:
            raise ConfigError(f"{key} is not for comparisons, which take methods, contenders, seeds and files (--file)")
    for listed, kind in (("methods", str), ("lr", float)):
        if isinstance(values.get(listed), str | float | int):
            values[listed] = _listed(listed, str(values[listed]), kind)
    config = validate(ComparisonConfig, _with_defaults(values))
    for key, value in ((RULE, rule), (CORRECTION, correction)):
        if value is not None and not files:
            row = find_method((config.methods or ["1f1b"])[0].partition(":")[0].strip())
            raise ConfigError(f"{key}: method {row.name!r} has its own, {getattr(row, key)}; it is for a --file")
    named = [*map(_in_short, config.methods), *config.contenders.items()]
    named += [_of_file(file, rule, correction) for file in files]
    labels = [label for label, _ in named]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"methods: {twice} is given twice (perhaps under another name); name each method once")
    return config.model_copy(update={"contenders": {label: _read(label, keys, config) for label, keys in named}})


@contextmanager
def said_of(label: str) -> Iterator[None]:
    """Say of what is wrong with a contender that it is this one."""
    try:
        yield
    except PenstockError as error:
        named = label.endswith((".py", ".txt")) and label in str(error).partition(" ")[0]  # by its path
        raise type(error)(str(error) if named else f"{label}: {error}") from None


def default_contenders() -> dict[str, dict[str, Any]]:
    """Return the contenders of a comparison that names none."""
    return dict(map(_in_short, ("1f1b", "2bw")))


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of comparisons: of a preset only those that do not change it."""
    model = values.get("model")
    preset = isinstance(model, Mapping) and "preset" in model
    filled = _merged({key: value for key, value in _DEFAULTS.items() if key != "model" or not preset}, values)
    if not preset and isinstance(filled["model"], dict) and isinstance(filled["stages"], int):
        filled["model"].setdefault("layers", max(filled["stages"], 4))
    evaluate = filled["evaluate"]
    if isinstance(evaluate, dict) and isinstance(evaluate.get("samples"), int):
        filled.setdefault("validation_samples", evaluate["samples"])
    return filled


def _in_short(text: str) -> tuple[str, dict[str, Any]]:
    """Return the label of METHOD:option=N:key=VALUE, and the keys that it changes.

    Raises:
        ConfigError: there is no such method or option.
    """
    name, options, keys = _divided(text)
    with said_of(text):
        values = with_method_options({"method": ":".join([name, *options])})
    return ":".join([values["method"], *options, *keys]), _merged(values, _nested(keys))


def _of_file(text: str, rule: str | None, correction: str | None) -> tuple[str, dict[str, Any]]:
    """Return the label of an order or a method of one's own, FILE:option=N:key=VALUE, and the keys that it changes."""
    name, options, keys = _divided(text)
    apart = [(RULE, rule), (CORRECTION, correction)]
    options += [f"{key}={said}" for key, said in apart if said and not any(o.startswith(f"{key}=") for o in options)]
    options = _sorted([part.strip() for option in options for part in option.split(":")])
    values = {"schedule": ":".join([name, *options])}
    return ":".join([Path(name).name, *options, *keys]), _merged(values, _nested(keys))


def _read(label: str, keys: Mapping[str, Any], config: ComparisonConfig) -> dict[str, Any]:
    """Return the keys that a contender changes, with the text of the schedule or method in place of its file.

    Raises:
        ConfigError: there is no such method or option; the file cannot be read, or holds a schedule of another size; or
            the code of a method stands where that of somebody else may.
        ScheduleError: the schedule in it is wrong.
    """
    with said_of(label):
        if keys.get("schedule") is None:
            return with_method_options(keys)
        refuse_code(keys["schedule"], "the configuration")
        values = _merged(config.model_dump(include={*TrainConfig.model_fields}), {"method": None}, keys)
        values = with_own_method(values)
        read = with_own_schedule(validate(TrainConfig, values), values)
    return {**keys, **{key: getattr(read, key) for key in _OF_METHOD}}


def _divided(text: str) -> tuple[str, list[str], list[str]]:
    """Divide NAME:option=N:key=VALUE into the name, options of the method or the order, and keys of a run."""
    name, *parts = (part.strip() for part in text.split(":"))
    known = {*known_keys(), *_SHORT} - {*OWN}
    keys = [part for part in parts if part.partition("=")[0].strip() in known]
    return name, _sorted([part for part in parts if part not in keys]), keys


def _sorted(options: Sequence[str]) -> list[str]:
    """Sort options: which method of a file, those of an order, its rule, its correction, those of that."""
    correction = next((part.partition("=")[2] for part in options if part.startswith(f"{CORRECTION}=")), "")
    correcting = CORRECTIONS[correction].options if correction in CORRECTIONS else ()

    def place(part: str) -> tuple[bool, bool, bool, bool, str]:
        name = part.partition("=")[0]
        return name != METHOD, name in correcting, name == CORRECTION, name == RULE, part

    return sorted(options, key=place)


def _nested(keys: Sequence[str]) -> dict[str, Any]:
    """Return keys of a run as nested values."""
    values: dict[str, Any] = {}
    for part in keys:
        key, _, value = part.partition("=")
        apply_change(TrainConfig, values, f"{_SHORT.get(key.strip(), key.strip())}={value.strip()}")
    return values


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested values; later ones win."""
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = _merged(found[key], value) if both else copy.deepcopy(value)
    return found


def _listed(key: str, text: str, kind: type) -> list[Any]:
    """Parse a comma-separated list of numbers."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{key} takes comma-separated numbers, such as 1e-3,3e-3; got {text!r}") from None
