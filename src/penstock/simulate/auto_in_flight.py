"""`in_flight="auto"`: as many microbatches in flight as links ask for, and as batch, memory and delay allow."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import gt

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.build import ScheduleRequest, smallest_microbatches
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED, check_in_flight, in_flight_on, write_in_flight
from penstock.schedule.ir.order import check_options, order_options
from penstock.schedule.ir.version_rules import RULES, Source
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.orders import ASK_LINKS, CHAINS, ORDERS
from penstock.schedule.orders.interleaved import groups_of
from penstock.schedule.proof.check import check_versions
from penstock.schedule.proof.proof import Proof
from penstock.simulate.costs import Costs
from penstock.simulate.least_in_flight import RankTimes, least_in_flight, least_interleaved, rank_times

_SPLIT_ORDERS, _INTERLEAVED = ("zb-h1",), "interleaved"


@dataclass(frozen=True)
class InFlightChoice:
    """Microbatches in flight on every rank; of interleaved 1F1B, passes of chunks on the first rank only.

    Attributes:
        taken: what to run with.
        asked: the least with which no rank waits for messages.
        plain: what the order has where messages take no time.
        reasons: why fewer are taken than the links ask for.
        later: by how much weights are read later with them, if they are.
        group: of interleaved 1F1B, the microbatches that run through a chunk together.
    """

    taken: tuple[int, ...]
    asked: tuple[int, ...]
    plain: tuple[int, ...]
    reasons: tuple[str, ...] = ()
    later: str = ""
    group: int | None = None

    def applied(self, request: ScheduleRequest) -> ScheduleRequest:
        """Return the request with these numbers in place of `auto`."""
        if self.group is None:
            return with_in_flight(request, self.taken)
        return replace(request, options={**request.options, "in_flight": self.taken[0], "group": self.group})

    def __str__(self) -> str:
        """Return the numbers with the reasons, for people."""
        plain = f"{write_in_flight(self.plain)} where messages take no time"
        return f"{self.counted} ({'; '.join([*self.why, plain])})"

    @property
    def counted(self) -> str:
        """What is taken, with what it counts and where: "3/1 microbatches on ranks 0 and 1"."""
        ranks = len(self.taken)
        if self.group is not None:
            return f"{write_in_flight(self.taken)} passes of chunks on rank 0"
        where = "rank 0" if ranks == 1 else f"ranks 0 {'and' if ranks == 2 else 'to'} {ranks - 1}"
        return f"{write_in_flight(self.taken)} microbatches on {where}"

    @property
    def why(self) -> list[str]:
        """Why they are not what links ask for, and what they cost; nothing where there is nothing to say."""
        asked = f"links ask for {write_in_flight(self.asked)}, but {' and '.join(self.reasons)}"
        return [asked] * bool(self.reasons) + [self.later] * bool(self.later)


def asks_for_auto(given: object) -> bool:
    """Whether this is a request of a method, or order, by name whose microbatches in flight are to be found.

    Raises:
        ConfigError: the order has no microbatches in flight to choose.
    """
    if not isinstance(given, ScheduleRequest) or given.options.get("in_flight") not in (AUTO, AUTO_DELAYED):
        return False
    if not isinstance(given.method, str) or callable(given.order):
        return False
    order = _order_of(given)
    what = f"method {given.method}" if given.order is None else f"order {order}"
    check_options(ORDERS[order], given.options, ORDERS, what)
    if ORDERS[order] not in ASK_LINKS:
        raise ConfigError(
            f"{what} takes a number of microbatches in flight, such as in_flight=8; got {given.options['in_flight']!r}"
        )
    return True


def splits(request: ScheduleRequest) -> bool:
    """Whether its backwards come in two halves."""
    return _order_of(request) in _SPLIT_ORDERS


def interleaves(request: ScheduleRequest) -> bool:
    """Whether its order is interleaved 1F1B, whose numbers count passes of chunks."""
    return _order_of(request) == _INTERLEAVED


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
    if interleaves(request):
        times = rank_times(costs, splits=False)
        choice = choose_interleaved(request, times, costs.transfer + costs.latency, costs.transfer)
        return choice.applied(request), choice
    if len(costs.stages) != request.stages:
        raise ConfigError(f"the costs describe {len(costs.stages)} stages, there are {request.stages}")
    times = rank_times(costs, splits=splits(request))
    hop = costs.transfer + costs.latency
    choice = as_allowed(request, lambda limits: least_in_flight(times, hop, costs.transfer, most=limits), most)
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
    plain = tuple(in_flight_on(request.stages, request.stages))
    assert isinstance(request.method, str)
    flushed = RULES[request.rule or find_method(request.method).rule].forward is Source.BATCH
    limits: Sequence[float] = [math.inf] * request.stages
    asked, reasons, later = least(limits), list[str](), ""

    def within(limits: Sequence[float]) -> tuple[int, ...]:
        return tuple(min(n, request.microbatches) if flushed else n for n in least(limits))

    taken = within(limits)
    if most is not None and any(map(gt, taken, most)):
        limits = most
        reasons.append(f"memory allows {write_in_flight(tuple(most))}")
    if at_most is not None and within(limits)[0] > at_most:
        limits = [min(n, at_most) for n in limits]
        reasons.append(f"a run takes at most {at_most}, those of its {request.stages} ranks and of two batches")
    taken, why = _as_batches_allow(request, within, limits, asked)
    reasons += why
    if any(map(gt, taken, plain)):
        fewer = tuple(map(min, taken, plain))
        later = _longer_delay(request, fewer, taken)
        if later and request.options["in_flight"] == AUTO:
            reasons.append(f"{later.format('would be')} (in_flight={AUTO_DELAYED} accepts that)")
            taken, later = fewer, ""
    return InFlightChoice(taken, asked, plain, tuple(reasons), later.format("are"))


def later_with(request: ScheduleRequest) -> str:
    """Say by how much weights are read later with the microbatches in flight that a request gives in numbers.

    Empty where they are not, and where the request leaves them to the order, or to what links ask for.
    """
    given = request.options.get("in_flight")
    if not isinstance(request.method, str) or not isinstance(given, int | Sequence) or isinstance(given, str):
        return ""
    flushed = RULES[request.rule or find_method(request.method).rule].forward is Source.BATCH
    if flushed or ORDERS[_order_of(request)] not in CHAINS:
        return ""
    plain, taken = (
        tuple(in_flight_on(request.stages, n))
        for n in (request.stages, check_in_flight("in_flight", given, request.stages))
    )
    return _longer_delay(request, plain, taken).format("are")


def _order_of(request: ScheduleRequest) -> str:
    assert isinstance(request.method, str)
    order = request.order or find_method(request.method).order
    assert isinstance(order, str)
    return order


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
    need = "" if enough is None else more
    return at_most(limit), [f"a batch has {request.microbatches} microbatches{need}"]


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


def choose_interleaved(
    request: ScheduleRequest,
    times: Sequence[RankTimes],
    hop: float,
    transfer: float = 0.0,
    most: Sequence[int] | None = None,
    **leave: float,
) -> InFlightChoice:
    """Return the group of interleaved 1F1B, unless it is given, and the passes of chunks in flight on the first rank.

    Args:
        request: which asks for `auto`.
        times, hop, transfer, leave: as of `penstock.simulate.least_in_flight.least_interleaved`.
        most: passes of chunks that the memory of each rank allows.
    """
    given, ranks, m = request.options.get("group"), request.stages, request.microbatches
    chunks = chunks_of(request)
    slots, group = least_interleaved(times, chunks, hop, transfer, **leave)
    asked = (ranks - 1) * slots + (chunks - 1) * group + 1

    def in_flight(slots: int, group: int, rank: int = 0) -> int:
        return (ranks - 1 - rank) * slots + (chunks - 1) * _largest(ranks, m, group) + 1

    usual, wanted = given or ranks, min(max(given or group, ranks), max(m, ranks))
    size = _largest(ranks, m, wanted)
    reasons = [f"a group has {size} microbatches where {group} would do"] if size < group else []

    def allowed(group: int) -> int:  # more slots than that, and ranks would wait for each other in a circle
        return max(min(slots, 2 * _largest(ranks, m, group) // ranks), 2)

    taken = allowed(wanted), wanted
    if most is not None:
        fits = [
            (n, g)
            for g in (range(wanted, usual - 1, -1) if given is None else [wanted])
            for n in range(allowed(g), 1, -1)
            if all(in_flight(n, g, rank) <= limit for rank, limit in enumerate(most))
        ]
        if taken not in fits:
            reasons.append(f"memory allows {write_in_flight(tuple(most))}")
            taken = max(fits, default=(2, usual))
    plain = (in_flight(2, usual),)
    return InFlightChoice((in_flight(*taken),), (asked,), plain, tuple(reasons), group=taken[1])


def _largest(ranks: int, microbatches: int, group: int) -> int:
    """Return the microbatches of the largest group."""
    return len(groups_of(ranks, microbatches, group)[0])


def chunks_of(request: ScheduleRequest) -> int:
    """Return the stages on every rank of interleaved 1F1B."""
    return int(request.options.get("chunks", order_options(ORDERS[_INTERLEAVED])["chunks"]))


def with_in_flight(request: ScheduleRequest, numbers: tuple[int, ...]) -> ScheduleRequest:
    """Return a request with other numbers of microbatches in flight."""
    return replace(request, options={**request.options, "in_flight": numbers})
