"""The simulator beside the measurement: how long a turn takes, given the passes that were measured and the link."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.network.arms import AUTO, METHODS, MODELS, STREAMS, case_named
from benchmarks.network.hosts import LINKS, Link
from penstock import ProvenSchedule, make_schedule
from penstock.schedule.machine.shared_machine import SharedCores
from penstock.simulate.costs import Costs, StageCost

Row = Mapping[str, Any]
"""A turn, as the raw data have it."""

TOLERANCE = 0.1
WAITS = ("wait", "room", "data")
_FILL = 4  # batches of a stream before those that are counted


def message_costs(link: Link, nbytes: int) -> dict[str, float]:
    """What `Costs` is told of messages: the only place that knows how a link delays them."""
    return {"latency": link.delay, "transfer": link.occupied(nbytes)}


def stage_costs(means: Mapping[str, float], stages: int) -> tuple[StageCost, ...]:
    """The seconds of every stage's passes and updates.

    Args:
        means: of "stage:operation".
        stages: how many there are.

    Raises:
        KeyError: there is no forward of a stage, so the turn is not of Penstock.
    """
    found = []
    for stage in range(stages):
        whole = means.get(f"{stage}:B", 0.0)
        halves = means.get(f"{stage}:I", whole / 2), means.get(f"{stage}:W", whole / 2)
        found.append(StageCost(means[f"{stage}:F"], *halves, means.get(f"{stage}:STEP", 0.0)))
    return tuple(found)


def clock_means(row: Row) -> dict[str, float]:
    """What passes and updates of a turn took by the clock, in the mean, by "stage:operation"."""
    return {name: mean for rank in row["ranks"] for name, (_, mean) in rank["work"].items()}


def measured_costs(row: Row, stages: int) -> Costs:
    """What a turn took by the clock: passes and updates as they were, and the link."""
    case = case_named(row["case"])
    return Costs(stage_costs(clock_means(row), stages), **message_costs(LINKS[row["link"]], MODELS[case.model].message))


def core_costs(row: Row, stages: int, cores: int) -> Costs | None:
    """What a turn took of cores, which all ranks share; None where that was not measured.

    What a rank's process takes besides passes, updates and waits counts as that of messages, at both ends alike. All
    takes longer by what other processes took meanwhile, and the host of this machine.
    """
    if "cores" not in row["ranks"][0]:
        return None
    case, means, ends = case_named(row["case"]), dict[str, float](), 0
    work = messages = waits = 0.0
    for rank in row["ranks"]:
        taken, counts = rank["cores"], {name: count for name, (count, _) in rank["work"].items()}
        means |= {name: taken[name] / count for name, count in counts.items()}
        waiting, working = (sum(taken.get(name, 0.0) for name in names) for names in (WAITS, counts))
        work, waits, messages = work + working, waits + waiting, messages + rank["cpu"] - working - waiting
        ends += 2 * sum(count for count, *_ in rank["messages"].values())
    longer = (row["cores"]["busy"] + row["cores"]["stolen"] - waits) / (work + messages)
    passes = stage_costs({name: longer * mean for name, mean in means.items()}, stages)
    message = longer * messages / max(ends, 1)
    links = message_costs(LINKS[row["link"]], MODELS[case.model].message)
    return Costs(passes, **links, send=message, receive=message, cores=SharedCores(cores))


def schedule_of(row: Row) -> ProvenSchedule:
    """The schedule of a turn; where a run has chosen its microbatches in flight, the activations tell them."""
    method, hosts = METHODS[row["arm"]], case_named(row["case"]).hosts
    if row["arm"] not in AUTO:
        return make_schedule(method, hosts, row["m"])
    return make_schedule(
        method, hosts, row["m"], options={"in_flight": [int(n) for n in row["ranks"][0]["activations"]]}
    )


def predict(row: Row, proof: ProvenSchedule, costs: Costs) -> float:
    """Return the seconds that the simulator finds for a turn."""
    batches = row["microbatches"] // row["m"]
    if row["arm"] not in STREAMS:
        return proof.simulate(costs, batches).timeline.makespan
    filled = proof.simulate(costs, _FILL).timeline.makespan
    return proof.simulate(costs, _FILL + batches).timeline.makespan - filled


def print_comparison(rows: Iterable[Row], cores: int) -> None:
    """Per case, link and arm of Penstock the medians of measured and predicted times, as Markdown.

    Args:
        rows: turns.
        cores: of the machine.
    """
    turns: dict[tuple[str, str, str], list[tuple[float, ...]]] = {}
    for row in rows:
        if row["arm"] not in METHODS:
            continue
        proof = schedule_of(row)
        stages, per = proof.schedule.num_stages, 1e3 * row["m"] / row["microbatches"]
        costs = [measured_costs(row, stages), core_costs(row, stages, cores)]
        times = [row["seconds"], *(predict(row, proof, each) for each in costs if each is not None)]
        turns.setdefault((row["case"], row["link"], row["arm"]), []).append(tuple(per * time for time in times))
    print("\nmeasured against the simulator with the measured passes; medians of the rounds\n")
    said = "measured, ms per batch | {0} | measured / {0} | shared cores | measured / shared cores"
    print(f"| case | link | arm | {said.format('own cores')} |\n|---|---|---|---|---|---|---|---|")
    within = [0, 0]
    for (name, link, arm), found in sorted(turns.items()):
        measured, *predicted = (statistics.median(times) for times in zip(*found, strict=True))
        cells = f"{measured:.1f}"
        for at, seconds in enumerate(predicted, 1):
            ratio = statistics.median(times[0] / times[at] for times in found)
            within[at - 1] += abs(ratio - 1) <= TOLERANCE
            cells += f" | {seconds:.1f} | {ratio:.3f}"
        print(f"| {name} | {link} | {arm} | {cells} |")
    print(
        f"\nof {len(turns)} step times, {within[0]} are within 10 % of what is simulated with passes by the clock, "
        f"and a core for each rank; {within[1]} of that with passes by what they take of {cores} cores"
    )
