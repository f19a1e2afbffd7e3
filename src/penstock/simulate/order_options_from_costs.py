"""Costs in the form of options, for orders that are searched for given times and memory (zb-auto, zb-exact, v-auto).

An option is a whole number and a time need not be one, so times are multiplied by what makes them whole: F = 18.522 and
W = 9.337 become 18522 and 9337. Only their ratios matter to a search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from penstock.schedule.ir.order import Options, order_options
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.schedule.orders import ORDERS
from penstock.simulate.costs import Costs

_PASSES = ("forward", "input", "weight")
_TIMES = (*_PASSES, "hop")
_LARGEST = 1_000_000
"""No time becomes a larger number: then it is rounded, to six digits."""


def with_search_options(
    method: str | Method, order: str | None, given: Options, costs: Costs, ranks: int
) -> dict[str, int]:
    """The options of an order, with those that tell a search the costs.

    Args:
        method: a row of the method table.
        order: the name of another order than the method's.
        given: options that a user has set. If a time is among them none is added, as theirs are in a unit of their own.
        costs: of all stages of a pipeline; a search knows one time per kind of pass, which is the mean over the ranks,
            and of messages that of links.
        ranks: of the pipeline.

    Returns:
        `given` as it is where the order is not searched for times, or where all passes take none.

    Raises:
        ConfigError: there is no such method.
    """
    function = ORDERS.get(order) if order else find_method(method).order_function
    known = {} if function is None else order_options(function)
    found = dict(given)
    if not set(_PASSES) <= known.keys():
        return found
    if not found.keys() & set(_TIMES):
        shares = [
            sum((Fraction(str(getattr(stage, name))) for stage in costs.stages), Fraction()) / ranks
            for name in ("forward", "backward_input", "backward_weight")
        ]
        if any(shares):
            found |= zip(_TIMES, _whole_numbers([*shares, _mean_latency(costs)]), strict=True)
    if "held" in known and "held" not in found:
        found["held"] = min(max(round(100 * costs.left), 1), 100)
    return found


def _mean_latency(costs: Costs) -> Fraction:
    links = costs.latency if isinstance(costs.latency, tuple) else (costs.latency,)
    return sum((Fraction(str(each)) for each in links), Fraction()) / max(len(links), 1)


def _whole_numbers(times: Sequence[Fraction]) -> list[int]:
    """Numbers in the ratios of F, I, W and the hop; passes that take no time get the least there is."""
    unit = Fraction(math.gcd(*(t.numerator for t in times)), math.lcm(*(t.denominator for t in times)))
    if not all(times[:3]):
        unit /= 1000  # so that 1 is next to nothing beside the others
    unit = max(unit, max(times) / _LARGEST)
    *passes, hop = (round(t / unit) for t in times)
    return [*(max(number, 1) for number in passes), hop]
