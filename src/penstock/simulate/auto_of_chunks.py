"""Microbatches in flight for links, where ranks have several stages: interleaved 1F1B by formula, ZB-V by trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import gt

from penstock.schedule.build import ScheduleRequest
from penstock.schedule.in_flight_choice import INTERLEAVED, InFlightChoice, plural, with_in_flight
from penstock.schedule.ir.in_flight_option import write_in_flight
from penstock.schedule.ir.order import order_options
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.orders import ORDERS
from penstock.schedule.orders.interleaved import groups_of
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.least_in_flight import RankTimes, least_interleaved
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule

_TRIALS = 16


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
    in_group = f"a group has {size} {plural((size,), 'microbatch', 'microbatches')}"
    reasons = [f"{in_group} where {group} would do"] if size < group else []

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
            least = "" if fits else ", less than the least that the order can do with"
            reasons.append(f"memory allows {write_in_flight(tuple(most))}{least}")
            taken = max(fits, default=(2, usual))
    plain = (in_flight(2, usual),)
    return InFlightChoice((in_flight(*taken),), (asked,), plain, tuple(reasons), group=taken[1])


def _largest(ranks: int, microbatches: int, group: int) -> int:
    """Return the microbatches of the largest group."""
    return len(groups_of(ranks, microbatches, group)[0])


def chunks_of(request: ScheduleRequest) -> int:
    """Return the stages on every rank of interleaved 1F1B."""
    return int(request.options.get("chunks", order_options(ORDERS[INTERLEAVED])["chunks"]))


def choose_on_v(
    request: ScheduleRequest,
    times: Sequence[RankTimes],
    hop: float,
    transfer: float = 0.0,
    most: Sequence[int] | None = None,
    leave: float = 0.0,
) -> InFlightChoice:
    """Return the least number of microbatches in flight with which simulated batches of ZB-V are the fastest.

    Args:
        request: which asks for `auto`.
        times: of the whole share of every rank.
        hop, transfer, leave: as of `penstock.simulate.least_in_flight.least_in_flight`.
        most: microbatches that the memory of each rank allows.
    """
    ranks = request.stages
    found: dict[int, tuple[float, tuple[int, ...]]] = {}

    def tried(n: int) -> tuple[float, tuple[int, ...]]:
        """The idle share of one more batch, and what ranks hold."""
        if n not in found:
            proof = with_in_flight(request, (n,)).prove()
            costs = costs_of_stages(proof.schedule, times, hop - transfer, transfer, halves=True)
            bubble = steady_bubble(simulate_schedule(proof, costs).lowered, costs, proof.steady_from + 2)
            found[n] = bubble, tuple(map(math.ceil, proof.activations))
        return found[n]

    def best(numbers: Iterable[int]) -> int:
        at_most = min(tried(n)[0] for n in numbers) + leave
        return min(n for n in numbers if tried(n)[0] <= at_most + 1e-9)

    passes = [min(time.forward, time.returns) / 2 for time in times]
    shortest = min(passes, default=0.0)
    enough = 1 + (ranks - 1) * (1 + math.ceil(hop / shortest - 1e-9)) if shortest else ranks
    enough = min(enough, max(request.microbatches, ranks) + ranks)
    numbers = sorted({ranks + (enough - ranks) * k // _TRIALS for k in range(_TRIALS + 1)})
    asked = taken = best(numbers)
    reasons = []
    if most is not None and any(map(gt, tried(asked)[1], most)):
        fits = [n for n in (*range(1, ranks), *numbers) if not any(map(gt, tried(n)[1], most))]
        needed = "" if fits else ", where a rank needs one"
        wanted = f" of the {write_in_flight(tried(asked)[1])} that are held with them"
        reasons.append(f"memory allows {write_in_flight(tuple(most))}{wanted}{needed}")
        taken = best(fits or [1])
    return InFlightChoice((taken,), (asked,), (ranks,), tuple(reasons), held=tried(taken)[1] if ranks > 1 else ())


def costs_of_stages(
    schedule: Schedule, times: Sequence[RankTimes], latency: float, transfer: float = 0.0, *, halves: bool
) -> Costs:
    """Return the costs of stages that share the times of their ranks evenly.

    Args:
        schedule: whose stages they are.
        times: of the whole share of every rank.
        latency, transfer: of a message.
        halves: backwards come in two halves.
    """
    stages = []
    for stage in sorted(schedule.stages):
        of_rank = times[stage.rank]
        forward, returns, rest = (time / len(schedule.on_rank(stage.rank)) for time in of_rank)
        stages.append(StageCost(forward, returns, rest) if halves else StageCost(forward, returns + rest, 0.0))
    return Costs(tuple(stages), latency, transfer)
