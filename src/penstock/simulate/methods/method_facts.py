"""What the schedules of methods cost: weight copies, delay, activations and bubble of every row of the table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from penstock.schedule.methods.method import Method
from penstock.schedule.methods.table import METHODS

USUAL = (4, 8)
"""Stages and microbatches if none are given."""
STORED = Path(__file__).with_name("usual_figures.json")
"""The figures of all methods for those: they take half a second to derive. A test derives and compares them."""


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
    from penstock.simulate.methods.method_figures import figures_of_methods  # not before, as this imports what proves

    rows = list(rows)
    found = figures_of_methods(rows, stages, microbatches, links.latency, links.in_flight)
    return [replace(_without_figures(row), **figures) for row, figures in zip(rows, found, strict=True)]


def _without_figures(method: Method) -> MethodFacts:
    """Return what a row has from the table of methods itself."""
    named = method.name, method.title, method.source, str(method.order), method.rule, method.spec.name
    levels = [level.value for level in method.shardings]
    return MethodFacts(*named, method.sharding, levels, method.spec.buffers)
