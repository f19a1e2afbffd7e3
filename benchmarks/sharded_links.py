"""How long sharded parallel pipelines take on links of several rates, beside the simulator.

    python -m benchmarks.sharded_links               # needs a quiet machine, and root on Linux
    python -m benchmarks.sharded_links --summary FILE ...

Four hosts, as in `benchmarks.links`: two pipelines of two ranks with four stages each, every stage a layer. Compared
are breadth-first on fully sharded state (`layered`), depth-first on fully sharded state, breadth-first with replicas,
and torch's `ScheduleLoopedBFS` over `fully_shard`. `benchmarks.sharded_bytes` counts what they send.

Times are compared with those of the simulator, given the passes that were measured, messages and transfers between
pipelines that have the whole link for themselves, and the gathers at the end of a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penstock
from benchmarks.network.arms import MODELS, PARALLEL, SHARDED, Case, case_named
from benchmarks.network.compare import clock_means, message_costs, stage_costs
from benchmarks.network.hosts import LINKS, why_not
from benchmarks.network.sharded_arms import CHUNKS, WIDTH
from benchmarks.network.sharded_rounds import measure
from benchmarks.throughput import RESULTS, interval, open_raw, read_raw
from penstock import ProvenSchedule
from penstock.schedule.ir.schedule import Op
from penstock.schedule.ir.sharding import Level
from penstock.simulate.costs import Costs
from penstock.simulate.sharding_traffic import Network as Traffic


def proof_of(method: str, case: Case) -> ProvenSchedule:
    """Prove the schedule of an arm of Penstock, with the sums of parallel pipelines."""
    task, depth = MODELS[case.model].task, case.hosts // WIDTH
    arm = penstock.Pipeline(
        task.stages(depth * CHUNKS),
        method=penstock.method(method, chunks=CHUNKS),
        stages=depth,
        microbatches=case.m,
        loss=task.loss,
        optimizer=task.optimizer,
        partition=[1] * depth * CHUNKS,
        data_parallel=WIDTH,
    )
    return ProvenSchedule.of(arm.proof)


def predict(row: dict[str, Any], proof: ProvenSchedule) -> float:
    """Return the seconds that the simulator finds for a run."""
    case, link = case_named(row["case"]), LINKS[row["link"]]
    model, schedule = MODELS[case.model], proof.schedule
    size = sum(p.numel() for part in model.task.stages(1) for p in part.parameters()) / schedule.num_stages
    traffic = Traffic(schedule, WIDTH, 1 / link.occupied(1), size)
    passes = stage_costs(clock_means(row), schedule.num_stages)
    costs = Costs(passes, **message_costs(link, model.message), network=traffic)
    seconds = proof.simulate(costs, row["microbatches"] // case.m).timeline.makespan
    if schedule.sharding.level is Level.FULL:
        seconds += CHUNKS * link.occupied(traffic.sent_for(Op.GATHER, schedule.stages[0]))
    return seconds


def print_times(rows: Sequence[dict[str, Any]], cases: Sequence[Case], links: Sequence[str]) -> None:
    """Print milliseconds per batch, as Markdown: the median of the rounds and an interval for it."""
    print("\n| arm | m | " + " | ".join(links) + " |\n" + "|---" * (2 + len(links)) + "|")
    for case in cases:
        for arm in case.arms:
            cells = []
            for link in links:
                here = [r for r in rows if (r["case"], r["arm"], r["link"]) == (case.name, arm, link)]
                most = max(r["microbatches"] for r in here)
                median, low, high = interval(
                    [1e3 * r["seconds"] * case.m / most for r in here if r["microbatches"] == most]
                )
                cells.append(f"{median:.0f} ({low:.0f}, {high:.0f})")
            print(f"| {arm} | {case.m} | {' | '.join(cells)} |")


def print_comparison(rows: Sequence[dict[str, Any]], cases: Sequence[Case], links: Sequence[str]) -> None:
    """Print medians of the milliseconds per batch that were measured and simulated, as Markdown."""
    print("\n| arm | m | link | measured | simulated | measured / simulated |\n|---|---|---|---|---|---|")
    for case in cases:
        for method in PARALLEL:
            arm, proof = f"penstock {method} x 2", proof_of(method, case)
            for link in links:
                here = [r for r in rows if (r["case"], r["arm"], r["link"]) == (case.name, arm, link)]
                most = max(r["microbatches"] for r in here)
                pairs = [(r["seconds"], predict(r, proof)) for r in here if r["microbatches"] == most]
                times = [1e3 * case.m / most * statistics.median(column) for column in zip(*pairs, strict=True)]
                cells = [f"{time:.0f}" for time in times] + [f"{statistics.median(a / b for a, b in pairs):.2f}"]
                print(f"| {arm} | {case.m} | {link} | {' | '.join(cells)} |")


def main() -> None:
    """Measure, or say what earlier runs have found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=4, help="of a turn")
    parser.add_argument("--links", nargs="+", default=["1 Gbit/s", "200 Mbit/s"], choices=list(LINKS))
    arms = SHARDED[0].arms
    parser.add_argument("--arms", nargs="+", default=list(arms), choices=arms, metavar="ARM", help="; ".join(arms))
    parser.add_argument("--summary", type=Path, nargs="+", help="print the times in these raw files instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    cases = [case._replace(arms=tuple(arguments.arms)) for case in SHARDED]
    if arguments.summary:
        rows = [row for path in arguments.summary for row in read_raw(path) if "arm" in row]
    elif reason := why_not():
        sys.exit(f"skipped: {reason}")
    else:
        out = open_raw("sharded_links", arguments.out)
        measure(cases, arguments.links, [arguments.batches], arguments.rounds, out)
        rows = read_raw(out)
    print_times(rows, cases, arguments.links)
    print_comparison(rows, cases, arguments.links)


if __name__ == "__main__":
    main()
