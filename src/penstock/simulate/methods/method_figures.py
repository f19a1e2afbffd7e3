"""Derives what the schedules of methods cost from their proofs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from penstock.errors import ScheduleError
from penstock.gc_pause import no_collection
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.order import NO_OPTIONS, Options
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.method import Method
from penstock.schedule.orders import ASK_LINKS, CHAINS
from penstock.schedule.proof.proof import Proof
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.option_choice.auto_in_flight import choose_in_flight
from penstock.simulate.option_choice.order_options_from_costs import with_search_options
from penstock.simulate.simulate import simulate_schedule


@no_collection
def figures_of_methods(
    methods: Iterable[Method],
    stages: int,
    microbatches: int,
    latency: float = 0.0,
    in_flight: int | tuple[int, ...] | str | None = None,
) -> list[dict[str, Any]]:
    """Derive figures of `penstock.simulate.methods.method_facts`, or a problem; those of one schedule from one proof.

    Args:
        methods: rows of the table.
        stages, microbatches: of the pipeline and of a batch.
        latency: time of a message.
        in_flight: microbatches in flight, for methods that have the option.
    """
    found: list[dict[str, Any]] = []
    known: dict[Schedule, dict[str, Any]] = {}  # by schedule, without its name
    costs = Costs((StageCost(1.0, 1.0, 1.0),) * stages, latency)
    for method in methods:
        try:
            request = ScheduleRequest(method.name, stages, microbatches, options=_options(method, costs, in_flight))
            request, _ = choose_in_flight(request, costs)
            nameless = replace(request.schedule, name="")
            figures = known[nameless] if nameless in known else _figures(request.prove(), latency)
        except ScheduleError as error:
            found.append({"problem": str(error).split(";")[0]})
            continue
        known[nameless] = figures
        found.append(figures)
    return found


def _options(method: Method, costs: Costs, numbers: int | tuple[int, ...] | str | None) -> Options:
    """Return the options of a method's order that the links ask for."""
    order = method.order_function
    auto = order in ASK_LINKS and not RULES[method.rule].provisional
    chooses = order in CHAINS if isinstance(numbers, int | tuple) else numbers and auto
    options = {"in_flight": numbers} if chooses else NO_OPTIONS
    return with_search_options(method.name, None, options, costs, len(costs.stages)) if costs.latency else options


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
