"""`in_flight="auto"`: as many microbatches in flight as links ask for, and as batch, memory and delay allow."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import gt

from penstock.errors import ConfigError
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.in_flight_choice import (
    FILLS,
    InFlightChoice,
    asked_order,
    interleaves,
    is_tried,
    plain_numbers,
    plural,
    splits,
    too_small,
    with_in_flight,
)
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED, check_in_flight, in_flight_on, write_in_flight
from penstock.schedule.ir.order import check_options
from penstock.schedule.ir.version_rules import RULES, VersionRule
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.orders import ASK_LINKS, CHAINS, ORDERS
from penstock.schedule.orders.without_auto import auto_refused
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
    if callable(given.method) or callable(given.order or find_method(given.method).order):
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
        costs: of its stages. Ranks with several stages take the latency of the slowest link for all.
        most: microbatches that the memory of each rank allows.

    Returns:
        The request with numbers, and how they were found; as it is, and None, where it does not ask for `auto`.

    Raises:
        ConfigError: the order has no microbatches in flight to choose.
    """
    if not asks_for_auto(request):
        return request, None
    hop = costs.transfer + costs.longest_latency
    if interleaves(request) or is_tried(request):
        times, choose = (
            rank_times(costs, splits=splits(request)),
            choose_by_trial if is_tried(request) else choose_interleaved,
        )
        choice = choose(request, times, hop, costs.transfer, most)
        return choice.applied(request), choice
    if len(costs.stages) != request.stages:
        raise ConfigError(f"the costs describe {len(costs.stages)} stages, there are {request.stages}")
    hops = [(costs.transfer + each, costs.transfer + each) for each in costs.latencies(request.stages)]
    times, fills = rank_times(costs, splits=splits(request)), asked_order(request) == FILLS
    choice = as_allowed(
        request, lambda limits: least_in_flight(times, hops, costs.transfer, most=limits, fills=fills), most
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
) -> InFlightChoice:
    """Return the microbatches in flight that links ask for, as far as batch, memory and delay allow.

    Only what these allow is proven, so that the time for it does not grow with what links ask for.

    Args:
        request: which asks for `auto`.
        least: returns what links ask for, if no rank may have more than it is told (`least_in_flight`).
        most: microbatches that the memory of each rank allows.
    """
    rule = _rule(request)
    in_a_batch = min(rule.most_in_flight(request.microbatches), most_of_a_run(request.stages, request.microbatches))

    def within(limits: Sequence[float]) -> tuple[int, ...]:
        if rule.flushes:  # then at most all forwards come first, and no rank waits for some that another may not begin
            return tuple(min(n, request.microbatches) for n in least(limits))
        return least([min(limit, in_a_batch) for limit in limits])

    usual = plain_numbers(request)
    plain = tuple(min(n, request.microbatches) for n in usual) if rule.flushes else usual
    asked, later = least([math.inf] * request.stages), ""
    limits, of_any_batch, reasons = _limits_of_memory(request, within, asked, most)
    taken, wanted = within(limits), least(of_any_batch)
    by_batch = list[str]()
    if wanted[0] > in_a_batch and not (rule.flushes and asked == usual):
        by_batch = [_by_batch(request, wanted[0], in_a_batch, limited=bool(reasons))]
    if not rule.flushes and not rule.delay and any(map(gt, taken, plain)):
        fewer = tuple(map(min, taken, plain))
        later = _longer_delay(request, fewer, taken)
        if later and request.options["in_flight"] == AUTO:
            by_batch = [f"{later.format('would be')} (in_flight={AUTO_DELAYED} accepts that)"]
            taken, later = fewer, ""
    held = _held(request, taken) if splits(request) else ()
    return InFlightChoice(taken, asked, plain, (*reasons, *by_batch), later.format("are"), held=held)


def _by_batch(request: ScheduleRequest, wanted: int, in_a_batch: float, *, limited: bool) -> str:
    """Say that batches are too small to have as many in flight as is wanted, and which size would do.

    Args:
        request: for such batches.
        wanted: on the first rank.
        in_a_batch: what such batches can have in flight there.
        limited: something else than batches allows fewer than links ask for, too.
    """
    ranks, rule = request.stages, _rule(request)
    enough = max(rule.least_microbatches(wanted), -(-(wanted - ranks) // 2))
    size = too_small(request.microbatches, enough, limited=limited)
    if rule.flushes or rule.delay:
        return f"a batch has {size}"
    depth = f"{ranks} {plural((ranks,), 'rank', 'ranks')}"
    return f"a run takes at most {in_a_batch}, those of its {depth} and of two batches of {size}"


def _rule(request: ScheduleRequest) -> VersionRule:
    assert not callable(request.method)
    return RULES[request.rule or find_method(request.method).rule]


def _held(request: ScheduleRequest, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the most microbatches whose activations each rank holds with these numbers."""
    if not splits(request):
        return numbers
    return tuple(map(math.ceil, with_in_flight(request, numbers).prove().activations))


def _limits_of_memory(
    request: ScheduleRequest,
    within: Callable[[Sequence[float]], tuple[int, ...]],
    asked: tuple[int, ...],
    most: Sequence[int] | None,
) -> tuple[Sequence[float], Sequence[float], list[str]]:
    """Return the numbers that memory allows each rank in batches of this size, in those of any size, and the reason.

    A rank that puts halves of backwards off holds more than it has ahead, and at least as many as the first rank has.
    Then all ranks have one limit, the largest one with which none holds more than its memory allows.
    """
    free: Sequence[float] = [math.inf] * request.stages
    if most is None:
        return free, free, []
    held = _held(request, within(free))
    limits = [max(min(most), 1)] * request.stages if splits(request) else [max(number, 1) for number in most]
    if not any(map(gt, held, most)):
        fewer = any(map(gt, asked, limits))
        return free, limits, [f"memory allows {write_in_flight(tuple(most))}"] * fewer

    def exceeds(limit: int) -> bool:
        return any(map(gt, _held(request, within([limit] * request.stages)), most))

    wanted = f" of the {write_in_flight(held)} that are held with them" if splits(request) else ""
    needed = ", where a rank needs one" * (min(most) < 1)
    if splits(request):
        longest = within(free)[0]
        limits = [max(bisect_left(range(longest), True, lo=1, key=exceeds) - 1, 1)] * request.stages
    return limits, limits, [f"memory allows {write_in_flight(tuple(most))}{wanted}{needed}"]


def later_with(request: ScheduleRequest) -> str:
    """Say by how much weights are read later with the microbatches in flight that a request gives in numbers.

    Empty where they are not, and where the request leaves them to the order, or to what links ask for.
    """
    given = request.options.get("in_flight")
    if callable(request.method) or not isinstance(given, int | Sequence) or isinstance(given, str):
        return ""
    if _rule(request).flushes or ORDERS[asked_order(request)] not in CHAINS:
        return ""
    plain, taken = (
        tuple(in_flight_on(request.stages, n))
        for n in (request.stages, check_in_flight("in_flight", given, request.stages))
    )
    return _longer_delay(request, plain, taken).format("are")


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
