"""What the schedules of methods cost: weight copies, delay, activations and bubble of every row of the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.gc_pause import no_collection
from penstock.schedule.ir.order import NO_OPTIONS, Options
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.corrections import CORRECTIONS
from penstock.schedule.methods.method import Method
from penstock.schedule.orders import ASK_LINKS, CHAINS, ORDERS
from penstock.schedule.proof.check import Proof
from penstock.simulate.auto_in_flight import choose_in_flight
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.search_options import with_search_options
from penstock.simulate.simulate import simulate_schedule


@dataclass(frozen=True)
class MethodFacts:
    """A row of `penstock methods`; everything but the names is derived from the schedule.

    Attributes:
        weight_copies: per rank, weights alive at once, all versions and predicted copies, in units of the rank's whole
            share of the model.
        sharding: what of the state of a stage the method splits over parallel pipelines by itself.
        shardings: the levels that may be asked for.
        buffers: further buffers of the correction, in the same units; stages without a delay may need none.
        delay: per rank, updates between the version read by a forward and the version updated, mean over a batch.
        activations: per rank, microbatches in flight at once, in units of the rank's whole share.
        bubble: idle / total of one more batch in a long run, with F = 1 and B = 2.
        problem: why there are no figures for these numbers of stages and microbatches.
    """

    name: str
    title: str
    source: str
    order: str
    rule: str
    correction: str
    sharding: str
    shardings: list[str]
    buffers: int
    weight_copies: list[float] | None = None
    delay: list[float] | None = None
    activations: list[float] | None = None
    bubble: float | None = None
    problem: str | None = None


class Links(NamedTuple):
    """The links between ranks, for the figures of methods.

    Attributes:
        latency: time of a message, where a forward takes 1 and a backward 2.
        in_flight: microbatches in flight, as of the option, for methods that have it; None for those of the order.
    """

    latency: float = 0.0
    in_flight: int | tuple[int, ...] | str | None = None


NO_LINKS = Links()


@no_collection
def facts_of_methods(
    methods: Iterable[Method], stages: int, microbatches: int, links: Links = NO_LINKS
) -> list[MethodFacts]:
    """Derive rows of the table, those of methods that have one schedule from one proof."""
    found: list[MethodFacts] = []
    known: dict[Schedule, dict[str, Any]] = {}  # by schedule, without its name
    costs = Costs((StageCost(1.0, 1.0, 1.0),) * stages, links.latency)
    for method in methods:
        try:
            request = ScheduleRequest(method.name, stages, microbatches, options=_options(method, costs, links))
            request, _ = choose_in_flight(request, costs)
            nameless = replace(request.schedule, name="")
            figures = known[nameless] if nameless in known else _figures(request.prove(), links.latency)
        except ScheduleError as error:
            found.append(replace(_without_figures(method), problem=str(error).split(";")[0]))
            continue
        known[nameless] = figures
        found.append(replace(_without_figures(method), **figures))
    return found


def _options(method: Method, costs: Costs, links: Links) -> Options:
    """Return the options of a method's order that the links ask for."""
    order, numbers = ORDERS[method.order], links.in_flight
    chooses = order in CHAINS if isinstance(numbers, int | tuple) else numbers and order in ASK_LINKS
    options = {"in_flight": numbers} if chooses else NO_OPTIONS
    return with_search_options(method.name, None, options, costs, len(costs.stages)) if links.latency else options


def _without_figures(method: Method) -> MethodFacts:
    """Return what a row has from the table of methods itself."""
    named = method.name, method.title, method.source, method.order, method.rule, method.correction
    levels = [level.value for level in method.shardings]
    return MethodFacts(*named, method.sharding, levels, CORRECTIONS[method.correction].buffers)


def _figures(proof: Proof, latency: float) -> dict[str, Any]:
    """Derive the figures of a row from a proof."""
    costs = Costs.uniform(proof.schedule, latency=latency)
    lowered = simulate_schedule(proof, costs).lowered if latency else proof.lowered
    ranks = range(proof.schedule.ranks)
    return {
        "weight_copies": [_copies_on(proof, rank) for rank in ranks],
        "delay": [delay_on(proof, rank) for rank in ranks],
        "activations": [float(a) for a in proof.activations],
        "bubble": max(steady_bubble(lowered, costs, proof.steady_from + 2), 0.0),
    }


def _copies_on(proof: Proof, rank: int) -> float:
    """Count versions and copies of all stages of a rank; one of v chunks counts 1/v, and both directions count."""
    schedule = proof.schedule
    held = {n: proof.stages[n].versions + proof.stages[n].copies for n in schedule.on_rank(rank)}
    return float(sum(Fraction(number, schedule.chunks[n]) for n, number in held.items()))


def delay_on(proof: Proof, rank: int) -> float:
    """Return the updates between the version read by forwards of a rank and the version updated, mean over a batch."""
    delays = [proof.stages[stage].delay.forward for stage in proof.schedule.on_rank(rank)]
    return sum(delays) / len(delays)
