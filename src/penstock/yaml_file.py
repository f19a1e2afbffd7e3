"""Reads YAML that a person has written: of limited size, whatever is in it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError
from penstock.guarded_files import read_given

LARGEST = 1 << 26
"""Bytes of a configuration: one with a schedule of a user's own may be large."""
_MOST_VALUES = 1_000_000  # of a configuration
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read keys and values from a YAML file.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        text = read_given(path, LARGEST)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not YAML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Parse keys and values in YAML.

    Args:
        text: the YAML.
        name: of the file, for messages.

    Raises:
        ConfigError: it is something else.
    """
    try:
        loaded = yaml_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name!r} is not YAML: {_fault(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{name!r} must hold keys and values, not a {type(loaded).__name__}")
    return loaded or {}


def _fault(error: yaml.YAMLError) -> str:
    """Return what is wrong, and where."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"


def yaml_value(text: str) -> Any:
    """Parse YAML.

    Raises:
        yaml.YAMLError: it is not YAML.
        ConfigError: it is nested too deep, aliases make it too large, or a number or a date in it cannot be.
    """
    try:
        found = yaml.safe_load(text)
        size = _size(found, {})
    except RecursionError:
        raise ConfigError("it is nested too deep") from None
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:  # PyYAML lets these through
        raise ConfigError(f"it holds what cannot be: {str(error).partition(';')[0]}") from None
    if size > _MOST_VALUES:
        raise ConfigError(f"it holds more than {_MOST_VALUES:,} values, or a value that holds itself")
    return found


def numbers_in(value: Any, texts: Collection[str] = ()) -> Any:
    """Return a value with the texts in it that YAML 1.2 reads as numbers, such as 9e9, as numbers.

    PyYAML reads YAML 1.1, where only 9.0e+9 is one.

    Args:
        value: as YAML is loaded.
        texts: keys whose values stay as they are.
    """
    if isinstance(value, list):
        return [numbers_in(each, texts) for each in value]
    if isinstance(value, dict):
        return {key: inner if key in texts else numbers_in(inner, texts) for key, inner in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) and len(value) < 40 else value


def _size(value: Any, known: dict[int, int]) -> int:
    """Return how many values there are in a value, those of aliases as often as they stand there.

    Args:
        value: as YAML is loaded.
        known: sizes by identity, so that aliases are looked into once.
    """
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_VALUES + 1  # of a value that holds itself
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(value)]
