"""A method by its name, with the options of its order and of its correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.checks import no_option
from penstock.errors import ConfigError
from penstock.repr_without_defaults import ShortRepr
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED
from penstock.schedule.ir.order import order_options
from penstock.schedule.methods.compatibility import correction_options
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.schedule.orders.without_auto import auto_refused
from penstock.schedule.proof.proof import Proof


@dataclass(frozen=True, repr=False)
class MethodChoice(ShortRepr):
    """A method with its options, as `method` returns it.

    Attributes:
        name: of the method; or the method itself, if it is a user's own.
        options: of its order, such as {"chunks": 2}.
        correction: options of its correction that were given, such as {"reschedule": 500}.
    """

    name: str | Method
    options: Mapping[str, Any] = field(default_factory=dict)
    correction: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class ProofOfChoice(Proof):
    """The proof of a schedule that knows which method was asked for, so that its correction goes with it.

    Attributes:
        chosen: the method with its options; None for orders of one's own.
    """

    chosen: MethodChoice | None = None


def method(name: str | Method, **options: Any) -> MethodChoice:
    """Name a method together with its options, such as ``method("pipemare", reschedule=500)``.

    Args:
        name: of the method (`penstock methods` lists them), or another name for it; or a `Method` of your own.
        options: of its order (``chunks=2`` of "interleaved") and of its correction.

    Raises:
        ConfigError: there is no such method or option, or an option has a value that it does not take.
    """
    row = find_method(name)
    of_order, of_correction = order_options(row.order_function), row.spec.options
    unknown = [option for option in options if option not in {*of_order, *of_correction}]
    if "sync" in unknown:
        raise ConfigError(
            f"method {row.name} has no option 'sync': sync is for comparisons (penstock compare {row.name}:sync=50); "
            f"in a run: --set sync.batches={options['sync']}; in Python, pipeline.switch('{row.name}') after 1f1b"
        )
    if options.get("in_flight") in (AUTO, AUTO_DELAYED) and "in_flight" in unknown:
        raise ConfigError(auto_refused(f"method {row}", row.order, options["in_flight"]))
    if unknown:
        raise ConfigError(no_option(f"method {row.name}", unknown[0], [*of_order, *of_correction]))
    correction = {k: v for k, v in options.items() if k in of_correction}
    correction_options(row, correction)  # refuses values that do not fit
    asked = row.name if isinstance(name, str) else row
    return MethodChoice(asked, {k: v for k, v in options.items() if k in of_order}, correction)
