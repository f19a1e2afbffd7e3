"""`in_flight="auto"`: as many microbatches in flight as links ask for, and as batch, memory and delay allow."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import gt

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.build import ScheduleRequest, smallest_microbatches
from penstock.schedule.in_flight_choice import (
    FILLS,
    InFlightChoice,
    asked_order,
    interleaves,
    is_tried,
    plain_numbers,
    plural,
    splits,
    with_in_flight,
)
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED, check_in_flight, in_flight_on, write_in_flight
from penstock.schedule.ir.order import check_options
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.orders import ASK_LINKS, CHAINS, ORDERS
from penstock.schedule.orders.without_auto import auto_refused
from penstock.schedule.proof.check import check_versions
from penstock.schedule.proof.proof import Proof
from penstock.simulate.auto_of_chunks import choose_by_trial, choose_interleaved
from penstock.simulate.costs import Costs
from penstock.simulate.least_in_flight import least_in_flight, rank_times


def asks_for_auto(given: object) -> bool:
    """Whether this is a request of a method, or order, by name whose microbatches in flight are to be found.

    Raises:
        ConfigError: the order has no microbatches in flight to choose.
    """
    if not isinstance(given, ScheduleRequest) or given.options.get("in_flight") not in (AUTO, AUTO_DELAYED):
        return False
    if not isinstance(given.method, str) or callable(given.order):
        return False
    order = asked_order(given)
    what = f"method {given.method}" if given.order is None else f"order {order}"
    if ORDERS[order] not in ASK_LINKS:
        raise ConfigError(auto_refused(what, order, given.options["in_flight"]))
    if RULES[given.rule or find_method(given.method).rule].provisional:
        raise ConfigError(
            f"{what} does not take in_flight={given.options['in_flight']!r}: where an update is taken back, its repair "
            "might wait for ever behind the messages of more microbatches. Leave it out, or take zb-h2"
        )
    check_options(ORDERS[order], given.options, ORDERS, what)
    return True


def choose_in_flight(
    request: ScheduleRequest, costs: Costs, most: Sequence[int] | None = None
) -> tuple[ScheduleRequest, InFlightChoice | None]:
    """Replace `in_flight="auto"` of a request by numbers.

    Args:
        request: for a method by its name; its order may be another one by name.
        costs: of its stages.
        most: microbatches that the memory of each rank allows.

    Returns:
        The request with numbers, and how they were found; as it is, and None, where it does not ask for `auto`.

    Raises:
        ConfigError: the order has no microbatches in flight to choose.
    """
    if not asks_for_auto(request):
        return request, None
    hop = costs.transfer + costs.latency
    if interleaves(request) or is_tried(request):
        times, choose = (
            rank_times(costs, splits=splits(request)),
            choose_by_trial if is_tried(request) else choose_interleaved,
        )
        choice = choose(request, times, hop, costs.transfer, most)
        return choice.applied(request), choice
    if len(costs.stages) != request.stages:
        raise ConfigError(f"the costs describe {len(costs.stages)} stages, there are {request.stages}")
    times, fills = rank_times(costs, splits=splits(request)), asked_order(request) == FILLS
    choice = as_allowed(
        request, lambda limits: least_in_flight(times, hop, costs.transfer, most=limits, fills=fills), most
    )
    return choice.applied(request), choice


def most_of_a_run(stages: int, microbatches: int) -> int:
    """Return how many microbatches a run has in flight on a rank at most, whatever its links ask for.

    So weights are read later by two updates at most, and decisions reach every rank in a known time.
    """
    return stages + 2 * microbatches


def as_allowed(
    request: ScheduleRequest,
    least: Callable[[Sequence[float]], tuple[int, ...]],
    most: Sequence[int] | None = None,
    at_most: int | None = None,
) -> InFlightChoice:
    """Return the microbatches in flight that links ask for, as far as batch, memory and delay allow.

    Args:
        request: which asks for `auto`.
        least: returns what links ask for, if no rank may have more than it is told (`least_in_flight`).
        most: microbatches that the memory of each rank allows.
        at_most: of a run; any number if None.
    """
    assert isinstance(request.method, str)
    flushed = RULES[request.rule or find_method(request.method).rule].flushes
    in_a_batch = request.microbatches if flushed else sys.maxsize
    plain = tuple(min(n, in_a_batch) for n in plain_numbers(request))
    limits: Sequence[float] = [math.inf] * request.stages
    asked, reasons, later = least(limits), list[str](), ""

    def within(limits: Sequence[float]) -> tuple[int, ...]:
        return tuple(min(n, in_a_batch) for n in least(limits))

    if most is not None and any(map(gt, held := _held(request, within(limits)), most)):
        limits = _limits_of_memory(request, within, most)
        wanted = f" of the {write_in_flight(held)} that are held with them" if splits(request) else ""
        needed = ", where a rank needs one" * (min(most) < 1)
        reasons.append(f"memory allows {write_in_flight(tuple(most))}{wanted}{needed}")
    if at_most is not None and within(limits)[0] > at_most:
        limits = [min(n, at_most) for n in limits]
        depth = f"{request.stages} {plural((request.stages,), 'rank', 'ranks')}"
        reasons.append(f"a run takes at most {at_most}, those of its {depth} and of two batches")
    taken, why = _as_batches_allow(request, within, limits, asked)
    reasons += why
    if not flushed and any(map(gt, taken, plain)):
        fewer = tuple(map(min, taken, plain))
        later = _longer_delay(request, fewer, taken)
        if later and request.options["in_flight"] == AUTO:
            reasons.append(f"{later.format('would be')} (in_flight={AUTO_DELAYED} accepts that)")
            taken, later = fewer, ""
    held = _held(request, taken) if splits(request) else ()
    return InFlightChoice(taken, asked, plain, tuple(reasons), later.format("are"), held=held)


def _held(request: ScheduleRequest, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the most microbatches whose activations each rank holds with these numbers."""
    if not splits(request):
        return numbers
    return tuple(map(math.ceil, with_in_flight(request, numbers).prove().activations))


def _limits_of_memory(
    request: ScheduleRequest, within: Callable[[Sequence[float]], tuple[int, ...]], most: Sequence[int]
) -> list[int]:
    """Return the numbers that memory allows each rank: a rank that puts halves of backwards off holds more than those.

    Then all ranks have one limit, the largest one with which none holds more than its memory allows.
    """
    if not splits(request):
        return [max(number, 1) for number in most]

    def exceeds(limit: int) -> bool:
        return any(map(gt, _held(request, within([limit] * request.stages)), most))

    wanted = within([math.inf] * request.stages)[0]
    return [max(bisect_left(range(wanted), True, lo=1, key=exceeds) - 1, 1)] * request.stages


def later_with(request: ScheduleRequest) -> str:
    """Say by how much weights are read later with the microbatches in flight that a request gives in numbers.

    Empty where they are not, and where the request leaves them to the order, or to what links ask for.
    """
    given = request.options.get("in_flight")
    if not isinstance(request.method, str) or not isinstance(given, int | Sequence) or isinstance(given, str):
        return ""
    flushed = RULES[request.rule or find_method(request.method).rule].flushes
    if flushed or ORDERS[asked_order(request)] not in CHAINS:
        return ""
    plain, taken = (
        tuple(in_flight_on(request.stages, n))
        for n in (request.stages, check_in_flight("in_flight", given, request.stages))
    )
    return _longer_delay(request, plain, taken).format("are")


def _as_batches_allow(
    request: ScheduleRequest,
    within: Callable[[Sequence[float]], tuple[int, ...]],
    limits: Sequence[float],
    asked: tuple[int, ...],
) -> tuple[tuple[int, ...], list[str]]:
    """Return the most of them that a batch of this size can have in flight under the version rule, and why no more."""
    wanted = within(limits)

    def at_most(limit: int) -> tuple[int, ...]:
        return within([min(number, limit) for number in limits])

    def fails(limit: int) -> bool:
        try:
            check_versions(with_in_flight(request, at_most(limit)).schedule)
        except ScheduleError:
            return True
        return False

    limit = wanted[0] if not fails(wanted[0]) else bisect_left(range(wanted[0]), True, lo=1, key=fails) - 1
    if limit == wanted[0]:
        return wanted, []
    enough = smallest_microbatches(
        request.method,
        request.stages,
        rule=request.rule,
        order=request.order,
        options={**request.options, "in_flight": asked},
        decides=request.decides,
        beyond=request.microbatches,
    )
    more = f", where {enough} would be enough (--microbatches {enough}, or microbatches={enough})"
    size = f"{request.microbatches} {plural((request.microbatches,), 'microbatch', 'microbatches')}"
    return at_most(limit), [f"a batch has {size}{'' if enough is None else more}"]


def _longer_delay(request: ScheduleRequest, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Say by how much weights are later than with other numbers in flight, with a gap for the verb; or nothing."""
    less, more = (_delays(with_in_flight(request, numbers).prove()) for numbers in (before, after))
    rank = max(range(len(less)), key=lambda r: more[r] - less[r])
    if more[rank] <= less[rank]:
        return ""
    return f"the weights that rank {rank} reads {{}} {more[rank]:.3g} instead of {less[rank]:.3g} updates late"


def _delays(proof: Proof) -> list[float]:
    """Updates between the version that a rank's passes read and the version updated, the longer one of both passes."""
    stages = [proof.schedule.on_rank(rank)[0] for rank in range(proof.schedule.ranks)]
    return [max(proof.stages[s].delay.forward, proof.stages[s].delay.backward) for s in stages]
