"""A method by its name, with the options of its order and of its correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.checks import did_you_mean
from penstock.errors import ConfigError
from penstock.schedule.ir.order import options_of
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.table import correction_options, find_method
from penstock.schedule.orders import ORDERS


@dataclass(frozen=True)
class MethodChoice:
    """A row of the method table and its options; what `method` returns.

    Attributes:
        name: of the row.
        options: of its order.
        correction: options of its correction, those that are given.
    """

    name: str
    options: Mapping[str, int] = field(default_factory=dict)
    correction: Mapping[str, float | None] = field(default_factory=dict)


def method(name: str, **options: Any) -> MethodChoice:
    """Choose a method, such as ``method("pipemare", reschedule=500)`` or ``method("interleaved", chunks=4)``.

    Args:
        name: of a row of the method table (`penstock methods`), or another name for it.
        options: of its order and of its correction.

    Raises:
        ConfigError: there is no such method or option, or an option has a value that it does not take.
    """
    row = find_method(name)
    of_order, of_correction = options_of(ORDERS[row.order]), CORRECTIONS[row.correction].options
    unknown = [option for option in options if option not in {*of_order, *of_correction}]
    if unknown:
        known = sorted({*of_order, *of_correction})
        hint = did_you_mean(unknown[0], known)
        has = f"its options are {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"method {row.name!r} has no option {unknown[0]!r}; {has}.{hint}")
    correction = {k: v for k, v in options.items() if k in of_correction}
    correction_options(row, correction)  # refuses values that do not fit
    return MethodChoice(row.name, {k: v for k, v in options.items() if k in of_order}, correction)
