"""Lists every key of a configuration with its default and meaning, including options of single methods."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.checks import nearest_keys
from penstock.schedule.ir.order import order_options
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.table import METHODS
from penstock.train.config.schema import TrainConfig

Key = tuple[str, Any, str]
"""Key, default, meaning."""


def described_keys(schema: type[BaseModel] = TrainConfig) -> list[Key]:
    """List every key (of sections as `section.key`) with its default and its meaning, including possible choices."""
    keys = []
    for name, field in schema.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            inner = section.model_fields.items()
            keys += [(f"{name}.{key}", value.default, _meaning(value)) for key, value in inner]
        else:
            keys.append((name, field.default, _meaning(field)))
    return keys


def _meaning(field: FieldInfo) -> str:
    """Return the description of a field, after its choices if the description does not name them."""
    meaning = field.description or ""
    choices = [choice for choice in _choices(field.annotation) if isinstance(choice, str)]
    if all(re.search(rf"(?<![\w-]){re.escape(choice)}(?![\w-])", meaning) for choice in choices):
        return meaning
    return f"{', '.join(choices[:-1])} or {choices[-1]}: {meaning}"


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def known_keys(schema: type[BaseModel] = TrainConfig) -> list[str]:
    """List every key and every section."""
    keys = [key for key, _, _ in described_keys(schema)]
    return [*keys, *sorted({key.partition(".")[0] for key in keys if "." in key})]


def suggested_keys(path: str, schema: type[BaseModel] = TrainConfig, cutoff: float = 0.5) -> list[str]:
    """Return the full paths of the keys that a mistyped one may stand for, at most three (see `nearest_keys`)."""
    known = known_keys(schema)
    if issubclass(schema, TrainConfig):
        known += [key for key, _, _ in (*order_keys(), *correction_keys())]
    return nearest_keys(path, known, cutoff)


def with_option_keys(keys: list[Key]) -> list[Key]:
    """Insert the options that methods have below the keys of sections of options."""
    inner = {"options": list(order_keys()), "correction": list(correction_keys())}
    return [row for key in keys for row in (key, *inner.get(key[0], ()))]


def order_keys() -> Iterator[Key]:
    """Yield the options of orders; the default is None where each order has its own."""
    found: dict[str, dict[str, int | None]] = {}
    for row in METHODS.values():
        for option, default in order_options(row.order_function).items():
            found.setdefault(option, {})[row.name] = default
    for option, methods in found.items():
        defaults = set(methods.values())
        default = defaults.pop() if len(defaults) == 1 else None
        yield f"options.{option}", default, f"of {', '.join(methods)} (docs/orders.md)"


def correction_keys() -> Iterator[Key]:
    """Yield the options of corrections."""
    options = {name: option for spec in CORRECTIONS.values() for name, option in spec.options.items()}
    for name, option in options.items():
        methods = [row.name for row in METHODS.values() if name in row.spec.options]
        yield f"correction.{name}", option.default, f"of {', '.join(methods)}: {option.meaning}"


def commented_reference() -> str:
    """Write every key with its default, under a comment with its meaning, as YAML that `load_config` can read."""
    lines, section = ["# Every key of a training run with its default. Leave out what you do not change."], ""
    for key, default, meaning in described_keys():
        group, _, last = key.rpartition(".")
        if group and group != section:
            section = group
            lines += ["", f"# {TrainConfig.model_fields[group].description}", f"{group}:"]
        indent = "  " if group else ""
        value = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()
        lines += [f"{indent}# {meaning}", f"{indent}{last}: {value}"]
        lines += [f"#   {option}: {said}" for option, _, said in with_option_keys([(key, default, meaning)])[1:]]
    return "\n".join(lines) + "\n"
