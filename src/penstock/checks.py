"""Checks of values that users set, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import TypeGuard, TypeVar

from penstock.errors import ConfigError

T = TypeVar("T")


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether `value` is an int, but not a bool, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole(what: str, value: object, least: int = 1) -> None:
    """Raise an error if a setting is not a whole number of at least `least`.

    Args:
        what: where the value was set, for the message, such as "combine: every".
        value: the value.
        least: the smallest allowed number.

    Raises:
        ConfigError: it is not.
    """
    if not is_whole(value, least):
        raise ConfigError(f"{what} must be a whole number of at least {least}, got {value!r}")


def nearest_of(name: object, known: Iterable[str], count: int) -> list[str]:
    """Return the known names that are similar to `name`, the most similar ones first, at most so many."""
    return difflib.get_close_matches(str(name), list(known), n=count, cutoff=0.5)


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar."""
    return next(iter(nearest_of(name, known, 1)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the most similar known name, or "" if none is similar."""
    near = nearest(name, known)
    return "" if near is None else f" Did you mean {near!r}?"


def finite_or_none(value: T) -> T | None:
    """Replace NaN and infinite floats by None, as JSON has neither."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
