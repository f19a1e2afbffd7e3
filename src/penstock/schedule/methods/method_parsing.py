"""Methods and files with options in one word: `interleaved:chunks=4`, `my_order.py:more=3:rule=stash`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.ir.in_flight_option import read_in_flight
from penstock.schedule.methods.choice import MethodChoice, method
from penstock.schedule.methods.corrections import CORRECTIONS, find_correction, options_of

Written = float | str | tuple[int, ...] | None
"""The value of an option as it is written: a number or null, or a word or several numbers where it takes them."""

RULE, CORRECTION, METHOD = "rule", "correction", "method"
"""What an order of one's own takes besides its options: a version rule, and the correction of stale weights; and which
method of a file with several."""
OWN = (RULE, CORRECTION, METHOD)

_LARGEST = 1e12
_WHOLE = re.compile(r"[+-]?[0-9]+")


def split_options(text: str, words: Collection[str] = ()) -> tuple[str, dict[str, Written]]:
    """Divide NAME:option=N:option=N into the name and its options; `null` is None, and in_flight may be a few numbers.

    Args:
        text: as it is written.
        words: options whose values are words.

    Raises:
        ConfigError: another option is not followed by a number.
    """
    name, *parts = text.split(":")
    options: dict[str, Written] = {}
    for part in parts:
        option, _, value = (word.strip() for word in part.partition("="))
        if option == "in_flight":
            options[option] = read_in_flight(value)
            continue
        if option in words and value:
            options[option] = value
            continue
        try:
            number = None if value == "null" else int(value) if _WHOLE.fullmatch(value) else float(value)
            if number is not None and not abs(number) <= _LARGEST:
                raise ValueError(value)
        except ValueError:
            raise ConfigError(
                f"{text!r:.80}: a name may be followed by options with numbers (or null), such as interleaved:chunks=4 "
                f"or pipemare:reschedule=100:decay=null; got {part!r:.80}"
            ) from None
        options[option] = number
    return name.strip(), options


def numbers_of(options: Mapping[str, Written]) -> dict[str, Any]:
    """Return the options of an order and of a correction, without those of `OWN`."""
    return {name: value for name, value in options.items() if name not in OWN}


def written_method(text: str) -> MethodChoice:
    """Read a method with its options.

    Raises:
        ConfigError: there is no such method or option, or an option has a value that it does not take.
    """
    name, options = split_options(text)
    return method(name, **options)


def check_given_once(name: str, options: Mapping[str, Any], alone: object) -> None:
    """Refuse an option that is written behind a name, and given by itself as well.

    Args:
        name: of the method, or the file.
        options: behind it.
        alone: what is given by itself, if that is a mapping.

    Raises:
        ConfigError: which one.
    """
    twice = next((key for key in options if key in alone), None) if isinstance(alone, Mapping) else None
    if twice is not None and isinstance(alone, Mapping):
        raise ConfigError(
            f"{twice} is given twice, in {name}:{twice}={options[twice]} and by itself, as {alone[twice]}; leave one "
            "of them out"
        )


def written_correction(text: str) -> tuple[str, dict[str, float | None]]:
    """Read a correction with the options that are given, such as `pipemare:reschedule=100`.

    Raises:
        ConfigError: there is no such correction or option, or an option has a value that it does not take.
    """
    name, options = split_options(text)
    given = numbers_of(options)
    options_of(find_correction(name).name, given)
    return name, given


@dataclass(frozen=True)
class WrittenOrder:
    """An order of one's own as it is written: FILE:option=N:rule=NAME:correction=NAME:option=N.

    Attributes:
        file: that holds it.
        options: of the order.
        rule: its version rule; None for that of the file, or "flush".
        correction: of stale weights; None for none.
        correcting: the options of the correction that are given.
        method: the name of the method, if the file holds several.
    """

    file: str
    options: Mapping[str, Any]
    rule: str | None = None
    correction: str | None = None
    correcting: Mapping[str, float | None] = field(default_factory=dict)
    method: str | None = None


def written_order(text: str, rule: str | None = None, correction: str | None = None) -> WrittenOrder:
    """Read an order of one's own.

    Args:
        text: as it is written.
        rule, correction: where it names none; a correction may have its options with it.

    Raises:
        ConfigError: an option has no value that it can have, or there is no such correction.
    """
    file, options = split_options(text, (RULE, CORRECTION))
    own_rule, own = options.get(RULE) or rule, options.get(CORRECTION)
    given = numbers_of(options)
    name, correcting = (None, {}) if correction is None or own is not None else written_correction(correction)
    if own is not None:
        name = find_correction(str(own)).name
        correcting = {option: given.pop(option) for option in CORRECTIONS[name].options if option in given}
        options_of(name, correcting)
    return WrittenOrder(file, whole_numbers(given), None if own_rule is None else str(own_rule), name, correcting)


def whole_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an order, which are whole numbers.

    Raises:
        ConfigError: one of them is not.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name == "in_flight":
            found[name] = value
            continue
        if value is None or not float(value).is_integer():
            raise ConfigError(f"{name} is an option of an order, so it must be a whole number; got {value!r}")
        found[name] = int(value)
    return found
