"""Costs of the schedules of methods, from their proofs: weight copies, delay, activations and bubble."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ScheduleError
from penstock.gc_pause import no_collection
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.order import NO_OPTIONS, Options
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders import ASK_LINKS, CHAINS
from penstock.schedule.proof.proof import Proof
from penstock.simulate.auto_in_flight import choose_in_flight
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.order_options_from_costs import with_search_options
from penstock.simulate.simulate import simulate_schedule

USUAL = (4, 8)
"""Stages and microbatches if none are given."""
STORED = Path(__file__).with_name("usual_figures.json")
"""The figures of all methods for those: they take half a second to derive. A test derives and compares them."""


@no_collection
def figures_of_methods(
    methods: Iterable[Method],
    stages: int,
    microbatches: int,
    latency: float = 0.0,
    in_flight: int | tuple[int, ...] | str | None = None,
) -> list[dict[str, Any]]:
    """Derive figures of `penstock.simulate.method_figures`, or a problem; those of one schedule from one proof.

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


def facts_of_methods(
    methods: Iterable[Method], stages: int, microbatches: int, links: Links = NO_LINKS
) -> list[MethodFacts]:
    """Return rows of the table, with figures that are stored or derived from schedules."""
    rows = list(methods)
    if (stages, microbatches) == USUAL and links == NO_LINKS and all(METHODS.get(row.name) is row for row in rows):
        figures = json.loads(STORED.read_text())
        return [replace(_without_figures(row), **figures[row.name]) for row in rows]
    return derived_facts(rows, stages, microbatches, links)


def derived_facts(rows: Iterable[Method], stages: int, microbatches: int, links: Links = NO_LINKS) -> list[MethodFacts]:
    """Return rows of the table, with figures derived from schedules."""
    from penstock.simulate.method_figures import figures_of_methods  # not before, as this imports what proves

    rows = list(rows)
    found = figures_of_methods(rows, stages, microbatches, links.latency, links.in_flight)
    return [replace(_without_figures(row), **figures) for row, figures in zip(rows, found, strict=True)]


def _without_figures(method: Method) -> MethodFacts:
    """Return what a row has from the table of methods itself."""
    named = method.name, method.title, method.source, str(method.order), method.rule, method.spec.name
    levels = [level.value for level in method.shardings]
    return MethodFacts(*named, method.sharding, levels, method.spec.buffers)
