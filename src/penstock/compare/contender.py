"""A method with its options, as one entry of a comparison, and how it is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from penstock.checks import in_short, is_whole, no_option
from penstock.errors import ConfigError
from penstock.schedule.ir.in_flight_option import write_in_flight
from penstock.schedule.ir.limits import MOST_BATCHES
from penstock.schedule.ir.order import order_options
from penstock.schedule.methods.corrections import CORRECTIONS, options_of
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.method_parsing import (
    CORRECTION,
    METHOD,
    OWN,
    RULE,
    Written,
    numbers_of,
    split_options,
    whole_numbers,
    written_order,
)
from penstock.train.config.own_schedule import held_method, own_row
from penstock.train.config.values import MOST_DELAY

SYNC, DELAYS = "sync", "delays"
"""Options of every method in a comparison: batches that 1f1b trains first, and updates that weights are late by."""
NO_SCHEDULES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Contender:
    """A method with its options, as one entry of a comparison.

    Attributes:
        method: its row in the table of methods.
        options: of its order, such as chunks=4, and of its correction, such as reschedule=100.
        sync: batches that 1f1b trains before it (PipeMare's T3, arXiv 1910.05124, section 3.3).
        delays: the number of updates by which all weights are delayed artificially, under a method that flushes.
        schedule: an order of one's own, as text; None for a method of the table or of one's own.
    """

    method: Method
    options: tuple[tuple[str, Any], ...] = ()
    sync: int = 0
    delays: int = 0
    schedule: str | None = None

    @property
    def for_order(self) -> dict[str, Any]:
        """Return the options of the order: those that are no options of the correction.

        Raises:
            ConfigError: the order has no such option either, or the value is not a whole number.
        """
        others = {name: value for name, value in self.options if name not in self._corrections}
        known = order_options(self.method.order_function)
        for name in others:
            if name not in known:
                raise ConfigError(no_option(f"method {self.method.name}", name, [*known, *self._corrections]))
        return whole_numbers(others)

    @property
    def for_correction(self) -> dict[str, float | None]:
        """Return all options of the correction, with defaults where none are given."""
        given = {name: value for name, value in self.options if name in self._corrections}
        return options_of(self.method.correction, given)

    @property
    def _corrections(self) -> Collection[str]:
        return self.method.spec.options

    @property
    def label(self) -> str:
        """The name with all options, such as "interleaved:chunks=4", which `parse_contender` can read."""
        ours = [(name, float(value)) for name, value in ((SYNC, self.sync), (DELAYS, self.delays)) if value]
        options = [*self.options, *ours]
        return ":".join([self.method.name, *(f"{name}={written_value(value)}" for name, value in options)])


def parse_contender(text: str, schedules: Mapping[str, str] = NO_SCHEDULES) -> Contender:
    """Parse METHOD or METHOD:option=N:option=N.

    Args:
        text: as it is written.
        schedules: orders of one's own, as text, by what stands in the place of a method.

    Raises:
        ConfigError: unknown method, or options of another form.
    """
    name, options = split_options(text, OWN)
    ours = {}
    for option, means, limit in (
        (SYNC, "batches that 1f1b trains first", MOST_BATCHES),
        (DELAYS, "updates that weights are late by", MOST_DELAY),
    ):
        number = options.pop(option, 0)
        if not is_whole(number) or number > limit:
            raise ConfigError(
                f"methods: {text!r}: {option} is the number of {means}, at most {limit}; got {in_short(number)}"
            )
        ours[option] = number
    if all(ours.values()):
        raise ConfigError(f"methods: {text!r}: delays and sync cannot be combined; leave one of them out")
    own = write_options(name, options)
    if own in schedules and (row := held_method(schedules[own])) is not None:
        given = tuple(sorted(numbers_of(options).items()))
        several = f":{METHOD}={options[METHOD]}" if METHOD in options else ""
        return Contender(replace(row, name=f"{name}{several}"), given, ours[SYNC], ours[DELAYS])
    if own in schedules:
        written = written_order(own)
        correcting = written.correcting
        others = {option: value for option, value in options.items() if option not in correcting}
        row = replace(own_row(schedules[own], written.correction), name=write_options(name, others))
        return Contender(row, tuple(sorted(correcting.items())), ours[SYNC], ours[DELAYS], schedules[own])
    for option, value in options.items():
        if isinstance(value, str):
            raise ConfigError(f"methods: {text!r}: {option}={value} is for an order of your own, given with --file")
    return Contender(find_method(name), tuple(sorted(numbers_of(options).items())), ours[SYNC], ours[DELAYS])


def write_options(name: str, options: Mapping[str, Written]) -> str:
    """Write options after a name: those of an order, its rule, its correction, the options of that, each sorted."""
    correcting = CORRECTIONS[str(options[CORRECTION])].options if options.get(CORRECTION) in CORRECTIONS else ()

    def place(option: str) -> tuple[bool, bool, bool, bool, str]:
        return option != METHOD, option in correcting, option == CORRECTION, option == RULE, option

    return ":".join([name, *(f"{option}={written_value(options[option])}" for option in sorted(options, key=place))])


def written_value(value: Written) -> str:
    """Write the value of an option as it may be given."""
    return "null" if value is None else f"{value:.12g}" if isinstance(value, int | float) else write_in_flight(value)
