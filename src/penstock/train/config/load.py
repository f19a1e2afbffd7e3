"""Loads a checked configuration from a YAML file, `key=value` changes, and the settings of the method's paper."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from penstock.checks import nearest
from penstock.errors import ConfigError
from penstock.schedule.methods.table import find_method
from penstock.train.config.key_reference import correction_keys, known_keys, order_keys
from penstock.train.config.schema import TrainConfig

Section = TypeVar("Section", bound=BaseModel)


def load_config(path: Path | None, changes: list[str]) -> TrainConfig:
    """Read a YAML file and apply `key=value` changes.

    Args:
        path: a YAML file with keys of `TrainConfig`; None for the defaults.
        changes: such as "method=1f1b" or "optimizer.lr=0.001"; values are read as YAML.

    Raises:
        ConfigError: lists every unknown key (with the nearest known one) and every value of a wrong type or range.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror or error}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{str(path)!r} is not YAML: {error}") from None
        if not isinstance(loaded, dict | None):
            raise ConfigError(f"{str(path)!r} must hold keys and values, not a {type(loaded).__name__}")
        values = loaded or {}
    for change in changes:
        apply_change(TrainConfig, values, change)
    return validate_config(with_settings(values))


def with_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the method's own settings (`Method.settings`) for keys that are not given.

    Settings of the optimizer apply to one kind of optimizer, so they are omitted if another kind is given.
    """
    filled = copy.deepcopy(dict(values))
    try:
        wanted = find_method(str(values.get("method", TrainConfig.model_fields["method"].default))).settings
    except ConfigError:  # reported by the validation
        return filled
    given = values.get("optimizer")
    kind = given.get("name") if isinstance(given, Mapping) else None
    for key, value in wanted.items():
        section, _, last = key.rpartition(".")
        if section and kind not in (None, wanted[f"{section}.name"]):
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
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [
            _explain(schema, tuple(map(str, e["loc"])), e["type"], e["msg"], e.get("input")) for e in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from None


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
    if not separator or not key:
        raise ConfigError(f"--set takes key=value, such as method=1f1b or optimizer.lr=0.001; got {change!r}")
    try:
        value = (
            text if _is_text(_type_of(schema, key.split("."))) and text not in ("null", "~") else yaml.safe_load(text)
        )
    except yaml.YAMLError:
        value = text
    *path, last = key.split(".")
    place = values
    for part in path:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change}: {part!r} is a value, not a section")
        place = inner
    place[last] = value


def _explain(schema: type[BaseModel], path: tuple[str, ...], kind: str, message: str, value: Any) -> str:
    key = ".".join(path)
    if kind == "extra_forbidden":
        known = list(known_keys(schema))
        ends = {full.rsplit(".", 1)[-1]: full for full in reversed(known)}  # of several the first
        near = ends.get(path[-1]) if len(path) == 1 else None
        near = near or nearest(key, known) or ends.get(nearest(path[-1], ends) or "")
        hint = f"; did you mean {near!r}?" if near else ""
        return f"unknown configuration key {key!r}{hint}"
    if kind in ("model_type", "dict_type"):
        return f"{key}: expected a section with keys, such as {key}.{_section_keys(schema, key)}, got {value!r}"
    if kind == "apart":  # a contradiction between values that are each valid
        return f"{key}: {message}"
    if value is None and ":" in path[-1]:  # YAML reads {a:1} as a key without a value
        return f"{key}: write a space after the colon, as in {path[-1].replace(':', ': ')}"
    otherwise = " or null" if _takes_null(schema, path) else ""
    return f"{key}: {message[0].lower()}{message[1:]}{otherwise}, got {value!r}"


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
