"""Loads a checked configuration from a YAML file, `key=value` changes, and the settings of the method's paper."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from penstock.checks import check_text, in_short, in_words
from penstock.errors import ConfigError
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method_parsing import check_given_once, written_correction, written_method, written_order
from penstock.train.config.key_reference import correction_keys, known_keys, order_keys, suggested_keys
from penstock.train.config.own_schedule import (
    held_method,
    is_file,
    read_own_method,
    read_own_schedule,
    refuse_code,
    schedule_in,
    size_fault,
)
from penstock.train.config.schema import TrainConfig
from penstock.yaml_file import read_yaml, yaml_value

Section = TypeVar("Section", bound=BaseModel)

_SWITCHES = MappingProxyType({"evaluate": ("every",), "sync": ("batches",), "fallback": ("at", "when")})
"""Keys of sections without which all others of the section have no effect."""

_NOT_PLANNED = frozenset(
    {
        "batches", "seed", "held_out", "validation_samples", "prompt", "sample_length", "out", "restarts", "timeout",
        "lr_schedule", "checkpoint", "evaluate", "predicted",
    }
)  # fmt: skip
"""Keys with which a batch takes as long as with any other value of them."""
_TOKENS = (".npy", ".bin")
"""Endings of data whose vocabulary is its own; the others are read byte by byte."""


def load_config(
    path: Path | None, changes: Sequence[str], *, proves: bool = True, resumes: bool = False
) -> TrainConfig:
    """Read a YAML file and apply `key=value` changes.

    A method may have its options with it (`method=interleaved:chunks=4`), which take the place of those of the file. A
    file in `schedule` is read here, once: the configuration holds the schedule itself, as text. Of `method` and
    `schedule` the one that a change gives counts.

    Args:
        path: a YAML file with keys of `TrainConfig`; None for the defaults.
        changes: such as "method=1f1b" or "optimizer.lr=0.001"; values are read as YAML.
        proves: False on the ranks of a job that runs already, whose rank 0 proves the schedule for all.
        resumes: whether a run goes on, whose configuration may hold the Python code of its method.

    Raises:
        ConfigError: lists every unknown key (with the nearest known one) and every value of a wrong type or range; also
            if a file cannot be read.
        ScheduleError: the schedule in a file is wrong.
    """
    values = {} if path is None else _read_configuration(path)
    if not resumes:
        refuse_code(values.get("schedule"), path)
    planned, given = copy.deepcopy(values), dict[str, Any]()
    for change in changes:
        apply_change(TrainConfig, values, change)
        apply_change(TrainConfig, given, change)
    if _counted(values) != _counted(planned):  # a batch is not what was planned
        values.pop("predicted", None)
    for one, other in (("method", "schedule"), ("schedule", "method")):
        if given.get(one) is not None and given.get(other) is None:
            values |= {other: None, "rule": given.get("rule"), "corrected_by": given.get("corrected_by")}
    _check_given_once(given)
    values = with_own_method(values)
    try:
        values = with_method_options(values)
        config = validate_config(with_settings(values))
    except ConfigError:
        if path is not None:
            _check_file(path)
        raise
    _check_switched_on(config, given)
    return with_own_schedule(config, values, proves=proves)


def with_own_method(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the file that `schedule` names by its text, if it holds a method, whose options are divided.

    Raises:
        ConfigError: the file fails, or its method has no such option.
    """
    text = values.get("schedule")
    if not isinstance(text, str) or values.get("method") is not None:
        return values
    if (read := read_own_method(text, values.get("rule"), values.get("corrected_by"))) is None:
        return values
    source, chosen = read
    given = {key: values.get(key) or {} for key in ("options", "correction")}
    for key, own in (("options", chosen.options), ("correction", chosen.correction)):
        check_given_once(text, own, given[key])
        given[key] = {**given[key], **own}
    return {**values, "method": None, "schedule": source, **given}


def _counted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that decide what a batch takes."""
    optimizer, data = values.get("optimizer"), str(values.get("data"))
    if isinstance(optimizer, Mapping):
        optimizer = {key: value for key, value in optimizer.items() if key != "lr"}
    found = {key: value for key, value in values.items() if key not in _NOT_PLANNED}
    return found | {"optimizer": optimizer or None, "data": data if data.endswith(_TOKENS) else None}


def _check_given_once(given: Mapping[str, Any]) -> None:
    """Refuse changes that give an option of a method with it, and by itself as well.

    Raises:
        ConfigError: they do; or there is no such method or option.
    """
    if isinstance(name := given.get("method"), str):
        chosen = written_method(name)
        check_given_once(name, chosen.options, given.get("options"))
        check_given_once(name, chosen.correction, given.get("correction"))


def _check_switched_on(config: TrainConfig, given: Mapping[str, Any]) -> None:
    """Refuse changes of a section that is switched off; in a file they may wait for it to be switched on.

    Raises:
        ConfigError: they would have no effect.
    """
    for name, switches in _SWITCHES.items():
        section = getattr(config, name)
        idle = next((key for key in given.get(name) or () if key not in switches), None)
        if idle is not None and all(getattr(section, key) == getattr(type(section)(), key) for key in switches):
            wanted = " or ".join(f"{name}.{key}" for key in switches)
            raise ConfigError(f"{name}.{idle} has no effect without {wanted}; set {wanted}, too, or leave it out")


def _read_configuration(path: Path) -> dict[str, Any]:
    """Read a configuration or a plan.

    Raises:
        ConfigError: it cannot be read, or is a profile or a cluster, which say what they are.
    """
    values = read_yaml(path)
    match str(values.get("format", "")).split():
        case ["penstock", "profile", *_]:
            raise ConfigError(
                f"{str(path)!r} is a profile, of which a plan is made: penstock plan --profile {path} --devices N "
                "--out plan.yaml"
            )
        case ["penstock", "cluster", *_]:
            raise ConfigError(f"{str(path)!r} is a cluster, for penstock plan --cluster {path} and penstock scale")
    return values


def _check_file(path: Path) -> None:
    """Check a configuration file without changes.

    Raises:
        ConfigError: what is wrong in it, with its name.
    """
    try:
        validate_config(with_settings(with_method_options(_read_configuration(path))))
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from None


def with_own_schedule(config: TrainConfig, values: Mapping[str, Any], *, proves: bool = True) -> TrainConfig:
    """Replace the file that `schedule` names by what it holds, and let sizes that were not given be those of it.

    Raises:
        ConfigError: there is neither a method nor a schedule, or both; the file cannot be read; or sizes or options
            are given that the schedule does not have.
        ScheduleError: the schedule in the file is wrong.
    """
    text = config.schedule
    if text is None:
        if config.method is None:
            raise ConfigError("method: give one (penstock methods lists them), or a schedule of your own with --file")
        return _without_own(config)
    if values.get("method") is not None:
        raise ConfigError(f"give either a method or a schedule of your own; leave method={values['method']} out")
    if held_method(text) is not None:
        return _without_own(config)
    if is_file(text):
        own = written_order(text, config.rule, config.corrected_by)
        own = replace(own, options={**config.options, **own.options})
        text, again = read_own_schedule(own, config.stages, config.microbatches, proves=proves), ""
        name, correcting = own.correction, own.correcting
    else:
        again = ", or give a file with another one (--file)"
        for key in ("options", "rule"):
            if getattr(config, key):
                raise ConfigError(f"{key}: a schedule that has been read takes none; leave it out, or give --file too")
        name, correcting = written_correction(config.corrected_by) if config.corrected_by else (None, {})
    if fault := size_fault(text, {key: values.get(key) for key in ("stages", "microbatches")}):
        raise ConfigError(f"{fault}{again}")
    found = schedule_in(text)
    read = {"stages": found.ranks, "microbatches": found.microbatches, "options": {}, "rule": None}
    corrected = {"corrected_by": name, "correction": {**config.correction, **correcting}}
    return config.model_copy(update={"method": None, "schedule": text, **read, **corrected})


def _without_own(config: TrainConfig) -> TrainConfig:
    """Return the configuration of a method, which has neither a rule nor a correction that is not its own.

    Raises:
        ConfigError: it has one.
    """
    row = config.row
    for key, value, its in (("rule", config.rule, row.rule), ("correction", config.corrected_by, row.correction)):
        if value is not None:
            raise ConfigError(
                f"{key}: method {row.name!r} has its own, {its}; leave {value!r} out, or give an order of your own "
                "(--file)"
            )
    return config


def with_method_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Divide a method with options, such as `interleaved:chunks=4`, into `method`, `options` and `correction`.

    Raises:
        ConfigError: there is no such method or option.
    """
    found = dict(values)
    if not isinstance(name := found.get("method"), str):
        return found
    chosen = written_method(name)
    found["method"] = chosen.name
    for section, options in (("options", chosen.options), ("correction", chosen.correction)):
        if options and isinstance(found.get(section, {}), Mapping):
            found[section] = {**found.get(section, {}), **options}
    return found


def with_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the method's own settings (`Method.settings`) for keys that are not given.

    Settings of the optimizer apply to one kind of optimizer, so they are omitted if another kind is given.
    """
    filled = copy.deepcopy(dict(values))
    name, own = values.get("method", TrainConfig.model_fields["method"].default), values.get("schedule")
    if isinstance(name, str):
        wanted = find_method(name).settings
    elif isinstance(own, str) and (row := held_method(own)) is not None:
        wanted = row.settings
    else:  # an order of one's own; anything else is reported by the validation
        return filled
    given = values.get("optimizer")
    kind = given.get("name") if isinstance(given, Mapping) else None
    for key, value in wanted.items():
        section, _, last = key.rpartition(".")
        if section and kind not in (None, wanted.get(f"{section}.name", kind)):
            continue
        place = filled.setdefault(section, {}) if section else filled
        if isinstance(place, dict):
            place.setdefault(last, value)
    return filled


def validate_config(values: dict[str, Any]) -> TrainConfig:
    """Check values against the schema of a training run.

    Raises:
        ConfigError: lists all problems.
    """
    return validate(TrainConfig, values)


def validate(schema: type[Section], values: dict[str, Any]) -> Section:
    """Check values against a schema.

    Raises:
        ConfigError: lists all problems.
    """
    _check_texts(values, "the configuration")
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [
            said
            for e in error.errors()
            for said in _explain(schema, tuple(map(str, e["loc"])), e["type"], e["msg"], e.get("input"))
        ]
        raise ConfigError("\n".join(problems)) from None


def _check_texts(value: Any, what: str) -> None:
    """Refuse texts in nested values that no file could have as its name, nor hold."""
    if isinstance(value, str):
        check_text(what, value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_texts(key, what)
            _check_texts(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            _check_texts(inner, what)


def apply_change(schema: type[BaseModel], values: dict[str, Any], change: str) -> None:
    """Put `key=value` into nested values.

    Args:
        schema: what the values are of; where it wants text, the value is taken as it is written, else read as YAML.
        values: are changed.
        change: `key=value`, of sections `section.key=value`.

    Raises:
        ConfigError: `change` does not have that form.
    """
    key, separator, text = change.partition("=")
    check_text("--set", change)
    if not separator or not key:
        raise ConfigError(f"--set takes key=value, such as method=1f1b or optimizer.lr=0.001; got {change!r}")
    try:
        value = text if _is_text(_type_of(schema, key.split("."))) and text not in ("null", "~") else yaml_value(text)
    except yaml.YAMLError:
        value = text
    except ConfigError as error:
        raise ConfigError(f"--set {change:.80}: {error}") from None
    *path, last = key.split(".")
    place = values
    for part in path:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change}: {part!r} is a value, not a section")
        place = inner
    place[last] = value


def _explain(schema: type[BaseModel], path: tuple[str, ...], kind: str, message: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the value at a path, a line for each unknown key."""
    key = ".".join(path)
    if kind == "extra_forbidden":
        for unknown in (f"{key}.{inner}" for inner in value) if isinstance(value, dict) and value else (key,):
            near = suggested_keys(unknown, schema)
            yield f"unknown configuration key {unknown!r}" + (f"; did you mean {in_words(near)}?" if near else "")
    elif kind in ("model_type", "dict_type"):
        yield f"{key}: expected a section with keys, such as {key}.{_section_keys(schema, key)}, got {in_short(value)}"
    elif kind == "list_type" and isinstance(value, str):
        yield f"{key}: input should be a list, as in {key}=[{value:.80}], got {in_short(value)}"
    elif kind == "apart":  # a contradiction between values that are each valid
        yield f"{key}: {message}".removeprefix(": ")
    elif value is None and ":" in path[-1]:  # YAML reads {a:1} as a key without a value
        yield f"{key}: write a space after the colon, as in {path[-1].replace(':', ': ')}"
    else:
        otherwise = " or null" if _takes_null(schema, path) else ""
        yield f"{key}: {message[0].lower()}{message[1:]}{otherwise}, got {in_short(value)}"


def _takes_null(schema: type[BaseModel], path: Sequence[str]) -> bool:
    """Whether the value at a path, as a whole, may be None."""
    return NoneType in get_args(_type_of(schema, path))


def _type_of(schema: type[BaseModel], path: Sequence[str]) -> Any:
    """The type of the value at a path; None where the schema has no such key."""
    inner: Any = schema
    for part in path:
        if not (isinstance(inner, type) and issubclass(inner, BaseModel) and part in inner.model_fields):
            return None
        inner = inner.model_fields[part].annotation
    return inner


def _is_text(kind: Any) -> bool:
    """Whether values of a type are text, one of some words, or null."""
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return all(_is_text(inner) for inner in get_args(kind) if inner is not NoneType)
    return kind is str


def _section_keys(schema: type[BaseModel], section: str) -> str:
    keys = [*known_keys(schema), *(key for key, _, _ in (*order_keys(), *correction_keys()))]
    return next((key.split(".")[1] for key in keys if key.startswith(f"{section}.")), "...")
