"""The simulator beside the measurement: how long a turn takes, given the passes that were measured and the link."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.network.arms import AUTO, METHODS, MODELS, STREAMS, case_named
from benchmarks.network.hosts import LINKS, Link
from penstock import ProvenSchedule, make_schedule
from penstock.simulate.costs import Costs, StageCost

Row = Mapping[str, Any]
"""A turn, as the raw data have it."""

TOLERANCE = 0.1
_FILL = 4  # batches of a stream before those that are counted


def message_costs(link: Link, nbytes: int) -> dict[str, float]:
    """What `Costs` is told of messages: the only place that knows how a link delays them."""
    return {"latency": link.delay, "transfer": link.occupied(nbytes)}


def stage_costs(row: Row, stages: int) -> tuple[StageCost, ...]:
    """The mean seconds of every stage's passes and updates in a turn.

    Raises:
        KeyError: the turn has no forward of a stage, so it is not of Penstock.
    """
    means = {name: mean for rank in row["ranks"] for name, (_, mean) in rank["work"].items()}
    found = []
    for stage in range(stages):
        whole = means.get(f"{stage}:B", 0.0)
        halves = means.get(f"{stage}:I", whole / 2), means.get(f"{stage}:W", whole / 2)
        found.append(StageCost(means[f"{stage}:F"], *halves, means.get(f"{stage}:STEP", 0.0)))
    return tuple(found)


def schedule_of(row: Row) -> ProvenSchedule:
    """The schedule of a turn; where a run has chosen its microbatches in flight, the activations tell them."""
    method, hosts = METHODS[row["arm"]], case_named(row["case"]).hosts
    if row["arm"] not in AUTO:
        return make_schedule(method, hosts, row["m"])
    return make_schedule(
        method, hosts, row["m"], options={"in_flight": [int(n) for n in row["ranks"][0]["activations"]]}
    )


def predict(row: Row, proof: ProvenSchedule) -> float:
    """Return the seconds that the simulator finds for a turn."""
    case, link = case_named(row["case"]), LINKS[row["link"]]
    costs = Costs(stage_costs(row, proof.schedule.num_stages), **message_costs(link, MODELS[case.model].message))
    batches = row["microbatches"] // case.m
    if row["arm"] not in STREAMS:
        return proof.simulate(costs, batches).timeline.makespan
    filled = proof.simulate(costs, _FILL).timeline.makespan
    return proof.simulate(costs, _FILL + batches).timeline.makespan - filled


def print_comparison(rows: Iterable[Row]) -> None:
    """Per case, link and arm of Penstock the medians of measured and predicted times, as Markdown."""
    turns: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["arm"] in METHODS:
            per = 1e3 * row["m"] / row["microbatches"]
            found = turns.setdefault((row["case"], row["link"], row["arm"]), [])
            found.append((per * row["seconds"], per * predict(row, schedule_of(row))))
    print("\nmeasured against the simulator with the measured passes; medians of the rounds\n")
    print("| case | link | arm | measured, ms per batch | simulated | measured / simulated | within 10 % |")
    print("|---|---|---|---|---|---|---|")
    within = 0
    for (name, link, arm), pairs in sorted(turns.items()):
        measured, simulated = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        near = abs(ratio - 1) <= TOLERANCE
        within += near
        said = "yes" if near else "no"
        print(f"| {name} | {link} | {arm} | {measured:.1f} | {simulated:.1f} | {ratio:.3f} | {said} |")
    print(f"\n{within} of {len(turns)} step times are within 10 %")
