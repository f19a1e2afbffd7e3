"""Methods and files with options in one word: `interleaved:chunks=4`, `pipemare:decay=null`, `my_order.py:more=3`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.ir.in_flight import read_in_flight
from penstock.schedule.methods.choice import MethodChoice, method

_LARGEST = 1e12
_WHOLE = re.compile(r"[+-]?[0-9]+")


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Divide NAME:option=N:option=N into the name and its options; `null` is None, and in_flight may be a few numbers.

    Raises:
        ConfigError: an option is not followed by a number.
    """
    name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        option, _, value = (word.strip() for word in part.partition("="))
        if option == "in_flight":
            options[option] = read_in_flight(value)
            continue
        try:
            options[option] = None if value == "null" else int(value) if _WHOLE.fullmatch(value) else float(value)
            if options[option] is not None and not abs(options[option] or 0) <= _LARGEST:
                raise ValueError(value)
        except ValueError:
            raise ConfigError(
                f"{text!r:.80}: a name may be followed by options with numbers (or null), such as interleaved:chunks=4 "
                f"or pipemare:reschedule=100:decay=null; got {part!r:.80}"
            ) from None
    return name.strip(), options


def written_method(text: str) -> MethodChoice:
    """Read a method with its options.

    Raises:
        ConfigError: there is no such method or option, or an option has a value that it does not take.
    """
    name, options = split_options(text)
    return method(name, **options)


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
