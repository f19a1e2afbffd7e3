"""Checks of values that users set, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeGuard, TypeVar

from penstock.errors import ConfigError

T = TypeVar("T")


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether `value` is an int, but not a bool, of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole(what: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise an error if a setting is not a whole number of at least `least`, and at most `most` if that is given.

    Args:
        what: where the value was set, for the message, such as "combine: every".
        value: the value.
        least: the smallest allowed number.
        most: the largest one; None for any.

    Raises:
        ConfigError: it is not.
    """
    if not is_whole(value, least):
        raise ConfigError(f"{what} must be a whole number of at least {least}, got {in_short(value)}")
    if most is not None and value > most:
        raise ConfigError(f"{what} must be at most {most:,}, got {in_short(value)}")


def in_short(value: object, most: int = 200) -> str:
    """Return a value as Python writes it, cut after `most` characters; of a long number, how many bits it has."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number within it is too long
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def in_brief(value: object) -> str:
    """Return what a value is, for a message: of a dict, which may hold a whole model, only what its entries are."""
    if not isinstance(value, Mapping):
        return in_short(value, 80)
    kinds = ", ".join(sorted({type(each).__name__ for each in value.values()}))
    first = f", the first {in_short(next(iter(value)), 40)}" if value else ""
    return f"a {type(value).__name__} of {len(value)} entries{f' ({kinds}{first})' if value else ''}"


def check_number(what: str, value: object, such_as: str) -> None:
    """Raise an error if a setting is neither a number nor None.

    Args:
        what: where the value was set, for the message.
        value: the value.
        such_as: an example, for the message.

    Raises:
        ConfigError: it is something else.
    """
    if value is not None and not is_number(value):
        raise ConfigError(f"{what} must be a number, such as {such_as}, or None; got {value!r:.80}")


def check_text(what: str, text: str) -> None:
    """Raise an error if a text was given in bytes that are not UTF-8, or holds the character 0.

    Raises:
        ConfigError: it was.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not UTF-8: {text!a:.80}") from None
    if "\0" in text:
        raise ConfigError(f"{what} holds the character 0: {text!a:.80}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a real number, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def similarity(name: str, other: str) -> float:
    """Return how similar two names are spelled: 1 if they are equal, 0 if they have no letter in common."""
    return difflib.SequenceMatcher(None, name, other).ratio()


def nearest_of(name: object, known: Iterable[str], count: int, cutoff: float = 0.5) -> list[str]:
    """Return the known names that are similar to `name`, the most similar ones first, at most so many."""
    return difflib.get_close_matches(str(name), list(known), n=count, cutoff=cutoff)


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar."""
    return next(iter(nearest_of(name, known, 1)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the most similar known name, or "" if none is similar."""
    near = nearest(name, known)
    return "" if near is None else f" Did you mean {near!r}?"


def no_option(owner: str, option: str, known: Iterable[str]) -> str:
    """Return the message for an option that something does not have, such as "method 2bw"."""
    names = list(known)
    offers = f"it has {', '.join(names)}" if names else "it has none"
    return f"{owner} has no option {option!r}; {offers}.{did_you_mean(option, names)}"


def nearest_keys(path: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Return the full paths of the keys that `path` may stand for, at most three.

    Keys with the same last part come first: `lr` is `optimizer.lr`, and `eval.every` the `every` of the section that
    is spelled most like `eval`; then whole paths and last parts that are spelled alike.

    Args:
        path: a mistyped key, with or without sections.
        known: full paths, such as "optimizer.lr".
        cutoff: how similar a spelling must be, from 0 to 1.
    """
    keys = list(known)
    section, _, last = path.rpartition(".")
    same = [key for key in keys if key.rpartition(".")[2] == last]
    if same and not section:
        return same[:3]
    if same:
        return nearest_of(path, same, 1)
    alike = nearest_of(path, keys, 1, cutoff)
    if alike:
        return alike
    lasts: dict[str, str] = {}
    for key in keys:
        lasts.setdefault(key.rpartition(".")[2], key)
    return [lasts[name] for name in nearest_of(last, lasts, 1, cutoff)]


def in_words(names: Iterable[str], joint: str = "or") -> str:
    """Return quoted names in a row, as in "'a', 'b' or 'c'"."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} {joint} {last}" if others else last


def finite_or_none(value: T) -> T | None:
    """Replace NaN and infinite floats by None, as JSON has neither."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
