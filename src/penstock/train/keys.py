"""Keys that only some methods have: the options of orders and of corrections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.schedule.corrections import CORRECTIONS
from penstock.schedule.methods import METHODS
from penstock.schedule.order import options_of
from penstock.schedule.orders import ORDERS

Key = tuple[str, Any, str]
"""Key, default, meaning."""


def with_options(keys: list[Key]) -> list[Key]:
    """All keys, and under those of sections of options what each method takes there."""
    inner = {"options": list(order_keys()), "correction": list(correction_keys())}
    return [row for key in keys for row in (key, *inner.get(key[0], ()))]


def order_keys() -> Iterator[Key]:
    """The options of orders; where the default is one of the order's own, it is None."""
    found: dict[str, dict[str, int | None]] = {}
    for row in METHODS.values():
        for option, default in options_of(ORDERS[row.order]).items():
            found.setdefault(option, {})[row.name] = default
    for option, methods in found.items():
        defaults = set(methods.values())
        default = defaults.pop() if len(defaults) == 1 else None
        yield f"options.{option}", default, f"of {', '.join(methods)} (docs/orders.md)"


def correction_keys() -> Iterator[Key]:
    """The options of corrections."""
    options = {name: option for spec in CORRECTIONS.values() for name, option in spec.options.items()}
    for name, option in options.items():
        methods = [row.name for row in METHODS.values() if name in CORRECTIONS[row.correction].options]
        yield f"correction.{name}", option.default, f"of {', '.join(methods)}: {option.meaning}"
