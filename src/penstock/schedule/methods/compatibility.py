"""Which options, shardings and ways to combine pipelines go with which methods, orders and rules."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import ConfigError
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.sharding import Sharding, read_sharding
from penstock.schedule.ir.version_rules import VersionRule
from penstock.schedule.methods.corrections import CorrectionSpec, correction_fault, find_correction, options_of
from penstock.schedule.methods.data_parallel_sync import COMBINES, combine_fault
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.table import METHODS
from penstock.schedule.transforms.sharding import sharding_fault


def correction_options(method: Method, given: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the options of a method's correction, with the defaults where none are given.

    Raises:
        ConfigError: it has no correction or no such option, or the option does not accept the value.
    """
    if given and not method.spec.options:
        option = next(iter(given))
        owners = ", ".join(row.name for row in METHODS.values() if option in row.spec.options)
        lacks = "no correction" if method.spec.name == "none" else "a correction without options"
        raise ConfigError(
            f"method {method.name!r} has {lacks}, so correction.{option} does not apply; methods that have it: "
            f"{owners or 'none'}"
        )
    return options_of(method.correction, given)


def sharding_of(method: Method, given: str | Sharding | None, rule: str | None = None) -> Sharding:
    """Return what of a stage's state is split under a method: what is given, or else what the method has.

    Args:
        method: which.
        given: as it is written, or the sharding itself; None for that of the method.
        rule: another version rule than the method's.

    Raises:
        ConfigError: what is given is no sharding, or does not go with the method.
    """
    sharding = read_sharding(method.sharding if given is None else given)
    fault = sharding_fault(rule or method.rule, sharding.level, method.spec.name, method.in_turns)
    if fault is not None:
        raise ConfigError(f"{method.name}: {fault}")
    return sharding


def compatible(
    order: Order, rule: VersionRule, correction: str | CorrectionSpec = "none", combine: str = "reduce"
) -> str | None:
    """Return why these choices cannot be combined, or None if they can."""
    if rule.flushes and order.endless:
        return (
            f"rule {rule.name!r} empties the pipeline after each batch, but the order lets batches overlap; name "
            "another rule, such as double-buffer"
        )
    spec = find_correction(correction)
    if combine not in COMBINES:
        return f"combine {combine!r} is not supported; known: {', '.join(COMBINES)}"
    if spec.name != "none" and (fault := correction_fault(rule, spec)):
        return fault
    return combine_fault(combine, rule.name, spec.name)
