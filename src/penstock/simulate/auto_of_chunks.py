"""Microbatches in flight for links where ranks have several stages: interleaved 1F1B by formula, others by trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import gt
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.in_flight_choice import INTERLEAVED, InFlightChoice, on_v, plural, too_small
from penstock.schedule.ir.in_flight_option import write_in_flight
from penstock.schedule.ir.order import order_options
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.orders import ORDERS
from penstock.schedule.orders.interleaved import groups_of
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.least_in_flight import RankTimes, least_interleaved
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule

_TRIALS, _TRIALS_OF_GROUPS = 16, 5


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
    in_group = f"a group has {size} {plural((size,), 'microbatch', 'microbatches')}{_as_given(request)}"
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


def _as_given(request: ScheduleRequest) -> str:
    """Say that groups are as large as they are because a user wants them so; nothing where that is not the reason."""
    given = request.options.get("group")
    return "" if given is None else f" (group={given} is given)"


def _largest(ranks: int, microbatches: int, group: int) -> int:
    """Return the microbatches of the largest group."""
    return len(groups_of(ranks, microbatches, group)[0])


def chunks_of(request: ScheduleRequest) -> int:
    """Return the stages on every rank of interleaved 1F1B."""
    return int(request.options.get("chunks", order_options(ORDERS[INTERLEAVED])["chunks"]))


class _Numbers(NamedTuple):
    """What is tried: the number in flight, and the group, of orders that have groups."""

    in_flight: int
    group: int | None = None


class _Trials:
    """Simulated batches with numbers in flight, each of which is simulated once; arguments as of `choose_by_trial`."""

    def __init__(self, request: ScheduleRequest, times: Sequence[RankTimes], hop: float, transfer: float) -> None:
        self._request, self._times, self._hop, self._transfer = request, times, hop, transfer
        self._found: dict[_Numbers, tuple[float, tuple[int, ...]]] = {}

    def idle(self, numbers: _Numbers) -> float:
        """Return the idle share of one more batch."""
        return self._tried(numbers)[0]

    def held(self, numbers: _Numbers) -> tuple[int, ...]:
        """Return the most microbatches whose activations each rank holds; of none if a batch is too small for them."""
        return self._tried(numbers)[1]

    def best(self, several: Iterable[_Numbers], leave: float) -> _Numbers:
        """Return those with which ranks hold the least, and idle no more than they have to, or by a share more."""
        at_most = min(self.idle(n) for n in several) + leave + 1e-9
        return min((n for n in several if self.idle(n) <= at_most), key=lambda n: (max(self.held(n), default=0), n))

    def _tried(self, numbers: _Numbers) -> tuple[float, tuple[int, ...]]:
        if numbers not in self._found:
            options = {key: value for key, value in numbers._asdict().items() if value is not None}
            try:
                proof = replace(self._request, options={**self._request.options, **options}).prove()
            except ScheduleError:  # a batch is too small for them
                return self._found.setdefault(numbers, (math.inf, ()))
            latency = self._hop - self._transfer
            costs = costs_of_stages(proof.schedule, self._times, latency, self._transfer, halves=True)
            bubble = steady_bubble(simulate_schedule(proof, costs).lowered, costs, proof.steady_from + 2)
            self._found[numbers] = bubble, tuple(map(math.ceil, proof.activations))
        return self._found[numbers]


def choose_by_trial(
    request: ScheduleRequest,
    times: Sequence[RankTimes],
    hop: float,
    transfer: float = 0.0,
    most: Sequence[int] | None = None,
    leave: float = 0.0,
) -> InFlightChoice:
    """Return the least in flight with which simulated batches of a zero-bubble order with several chunks are fastest.

    Args:
        request: which asks for `auto`.
        times: of the whole share of every rank.
        hop, transfer, leave: as of `penstock.simulate.least_in_flight.least_in_flight`.
        most: microbatches that the memory of each rank allows.
    """
    ranks = request.stages
    trials = _Trials(request, times, hop, transfer)
    plain, more, fewer = (_on_v if on_v(request) else _in_groups)(request, times, hop)
    numbers = [n for n in more if trials.held(n)] or [plain]
    taken = trials.best(numbers, leave)
    asked, reasons = _beyond_groups(request, times, hop, trials, taken, leave)
    (hides, enough), m = _hides(request, times, hop), request.microbatches
    waits = 2 * hop > max(leave, 1e-9) * max(here.total for here in times)
    all_in_flight = waits and max(trials.held(taken), default=0) == m < enough
    if most is not None and any(map(gt, trials.held(taken), most)):
        less = [n for n in fewer if trials.held(n)]
        fits = [n for n in (*less, *numbers) if not any(map(gt, trials.held(n), most))]
        least = (
            ", where a rank needs one" if plain.group is None else ", less than the least that the order can do with"
        )
        needed = "" if fits else least
        wanted = f" of the {write_in_flight(trials.held(taken))} that are held with them"
        reasons.append(f"memory allows {write_in_flight(tuple(most))}{wanted}{needed}")
        taken = trials.best(fits or less[:1] or [plain], leave)
    elif all_in_flight and not reasons:
        asked, room = hides, min(most or [enough])
        if most is not None and room < enough:
            reasons.append(f"memory allows {write_in_flight(tuple(most))}")
        if m < room:
            reasons.append(f"a batch has {too_small(m, min(room, enough), limited=bool(reasons))}")
    held = trials.held(taken) if ranks > 1 else ()
    chosen, asks, usual = ((n.in_flight,) for n in (taken, asked, plain))
    return InFlightChoice(chosen, asks, usual, tuple(reasons), group=taken.group, held=held)


def _beyond_groups(
    request: ScheduleRequest,
    times: Sequence[RankTimes],
    hop: float,
    trials: _Trials,
    taken: _Numbers,
    leave: float,
) -> tuple[_Numbers, list[str]]:
    """Return what is faster than what is taken in groups of any size, and that the given one is why it is not taken."""
    given = request.options.get("group")
    if given is None:
        return taken, []
    options = {key: value for key, value in request.options.items() if key != "group"}
    free = [n for n in _in_groups(replace(request, options=options), times, hop)[1] if trials.held(n)]
    if not free or trials.idle(taken) <= min(map(trials.idle, free)) + leave + 1e-9:
        return taken, []
    asked = trials.best(free, leave)
    return asked, [f"a group has {taken.group} microbatches{_as_given(request)} where {asked.group} would do"]


def _hides(request: ScheduleRequest, times: Sequence[RankTimes], hop: float) -> tuple[_Numbers, int]:
    """Return what hides messages in batches of any size, and the smallest size with so many in flight.

    A message takes as long as so many passes of the slowest rank, which has three of every chunk for a microbatch.
    """
    ranks, chunks = request.stages, 2 if on_v(request) else chunks_of(request)
    passes = 3 * chunks * hop / max(max(here.total for here in times), 1e-12)
    if on_v(request):
        return _Numbers(n := 1 + (ranks - 1) * (math.ceil(passes - 1e-9) + 1)), n
    more = 1 + math.ceil(2 * passes - 1e-9)
    group = request.options.get("group") or _group(ranks, more)
    n = 1 + (chunks - 1) * group + (ranks - 1) * more
    return _Numbers(n, group), max(group, -(-n // chunks))


def _on_v(
    request: ScheduleRequest, times: Sequence[RankTimes], hop: float
) -> tuple[_Numbers, list[_Numbers], list[_Numbers]]:
    """Return for ZB-V what it has where messages take no time, what may be faster over links, and what takes less."""
    ranks = request.stages
    shortest = _shortest_pass(times, 2)
    enough = 1 + (ranks - 1) * (1 + math.ceil(hop / shortest - 1e-9)) if shortest else ranks
    enough = min(enough, max(request.microbatches, ranks) + ranks)
    numbers = sorted({ranks + (enough - ranks) * k // _TRIALS for k in range(_TRIALS + 1)})
    return _Numbers(ranks), [_Numbers(n) for n in numbers], [_Numbers(n) for n in range(1, ranks)]


def _in_groups(
    request: ScheduleRequest, times: Sequence[RankTimes], hop: float
) -> tuple[_Numbers, list[_Numbers], list[_Numbers]]:
    """Return the same for interleaved zero bubble: s forwards more ahead with every rank, and groups that go with them.

    With s = 1 it is plain. A hop there and back takes 2 hop / pass more of them, and the more there are, the later a
    microbatch is back on the first rank, so groups grow by half as much.
    """
    ranks, m, chunks, given = request.stages, request.microbatches, chunks_of(request), request.options.get("group")
    shortest = _shortest_pass(times, chunks)
    enough = 1 + math.ceil(2 * hop / shortest - 1e-9) if shortest else 1
    enough = min(enough, 1 + chunks * m)

    def with_more(more: int) -> set[_Numbers]:
        groups = {ranks, max(min(_group(ranks, more), m), ranks)} if given is None else {given}
        return {_Numbers(1 + (chunks - 1) * _largest(ranks, m, g) + (ranks - 1) * more, g) for g in groups}

    steps = sorted({1 + (enough - 1) * k // _TRIALS_OF_GROUPS for k in range(_TRIALS_OF_GROUPS + 1)})
    (plain,) = with_more(1)
    return plain, sorted({n for more in steps for n in with_more(more)}), sorted(with_more(0))


def _group(ranks: int, more: int) -> int:
    """Return the group with which a microbatch is back in time, if every rank has so many more ahead than the next."""
    return ranks + math.ceil((ranks - 1) * max(more - 1, 0) / 2)


def _shortest_pass(times: Sequence[RankTimes], chunks: int) -> float:
    """Return the time of the shortest pass of a chunk."""
    return min((min(time.forward, time.returns) / chunks for time in times), default=0.0)


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
