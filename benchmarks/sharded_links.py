"""What sharded parallel pipelines send, and how long they take for it: bytes counted by the kernel, times on links.

    python -m benchmarks.sharded_links --bytes       # what each host sends per batch; minutes, also on a busy machine
    python -m benchmarks.sharded_links               # times, too, on links of several rates; needs a quiet machine
    python -m benchmarks.sharded_links --levels      # 2bw with sharded gradients beside replicas, on loopback

Four hosts, as in `benchmarks.links`: two pipelines of two ranks with four stages each, every stage a layer. Compared
are breadth-first on fully sharded state (`layered`), depth-first on fully sharded state, breadth-first with replicas,
and torch's `ScheduleLoopedBFS` over `fully_shard`. Expected bytes are those of messages between stages, of (w - 1) / w
of the weights for every gather, and of (w - 1) / w of the gradients for every reduction, 2 (w - 1) / w of them where
they are replicated. At the end of a run weights are made whole, so the bytes of a batch are those of a run less those
of a shorter one.

Times are compared with those of the simulator, given the passes that were measured, messages and transfers between
pipelines that have the whole link for themselves, and the gathers at the end of a run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import penstock
from benchmarks.links import Turn, take
from benchmarks.network.arms import MODELS, PARALLEL, REPLICATED, SHARDED, Case, case_named
from benchmarks.network.compare import clock_means, message_costs, stage_costs
from benchmarks.network.hosts import LINKS, Network, why_not
from benchmarks.network.sharded_arms import CHUNKS, WIDTH
from benchmarks.network.team import Team
from benchmarks.throughput import RESULTS, interval, open_raw, read_raw
from penstock import ProvenSchedule, make_schedule
from penstock.schedule.ir.schedule import Op
from penstock.schedule.ir.sharding import Level
from penstock.simulate.costs import Costs
from penstock.simulate.sharding_traffic import Network as Traffic


def expected(method: str, case: Case) -> list[float]:
    """Return the bytes that each rank of a pipeline has to send for a batch."""
    model, depth = MODELS[case.model], case.hosts // WIDTH
    schedule = make_schedule(method, depth, case.m, options={"chunks": CHUNKS}).schedule
    sizes = [sum(p.numel() for p in part.parameters()) for part in model.task.stages(schedule.num_stages)]
    found = []
    for rank, program in enumerate(schedule.programs):
        total = 0.0
        for action in program.period:
            traffic = Traffic(schedule, WIDTH, parameters=sizes[action.stage.index])
            total += traffic.sent(action)
            if method == "breadth-first" and action.op is Op.STEP:  # sums of replicas are no actions of the order
                total += 2 * (WIDTH - 1) / WIDTH * 4 * sizes[action.stage.index]
            if action.op in (Op.F, Op.B):
                other = action.stage.index + (1 if action.op is Op.F else -1)
                crosses = 0 <= other < schedule.num_stages and schedule.stage_at[other, 0].rank != rank
                total += model.message * action.unit.count * crosses
        found.append(total)
    return found


def measure(cases: Sequence[Case], links: Sequence[str], arguments: argparse.Namespace, out: Path) -> None:
    """Run every arm on every link in every round, in random order; the raw data grow by a line per turn."""
    turns = [Turn(case, LINKS[link], arm) for case in cases for link in links for arm in case.arms]
    with ExitStack() as stack, out.open("a") as file:
        network = stack.enter_context(Network(cases[0].hosts))
        team = stack.enter_context(Team(network, cases[0].hosts, alone=LINKS[links[0]].mbit is None))
        for case in cases:
            team.ask("make", case=case.name, arms=list(case.arms))
        for round_ in range(arguments.rounds):
            for turn in random.Random(round_).sample(turns, len(turns)):
                for batches in arguments.batches:
                    row = take(turn, network, team, batches * turn.case.m)
                    print(json.dumps({"round": round_, **row}), file=file, flush=True)
            print(f"round {round_}: {len(turns)} turns", flush=True)
        team.ask("close")


def print_bytes(rows: Sequence[dict[str, Any]], cases: Sequence[Case]) -> None:
    """Print what ranks send per batch beside what is expected, as Markdown."""
    print("\n| arm | m | sent by each rank of a pipeline, MB per batch | expected | sent / expected |")
    print("|---|---|---|---|---|")
    for case in cases:
        for arm in case.arms:
            here = [row for row in rows if row["case"] == case.name and row["arm"] == arm]
            sent = [_per_batch(here, case.m, rank) for rank in range(case.hosts // WIDTH)]
            method = next((m for m in PARALLEL if arm == f"penstock {m} x 2"), None)
            cells = [", ".join(f"{x / 1e6:.2f}" for x in sent), "", ""]
            if method is not None:
                wanted = expected(method, case)
                cells[1] = ", ".join(f"{x / 1e6:.2f}" for x in wanted)
                cells[2] = ", ".join(f"{a / b:.3f}" for a, b in zip(sent, wanted, strict=True))
            print(f"| {arm} | {case.m} | {' | '.join(cells)} |")


def _per_batch(rows: Sequence[dict[str, Any]], m: int, rank: int) -> float:
    """Return the bytes that a rank sends for another batch of a run."""
    counts = sorted({row["microbatches"] // m for row in rows})
    least, most = (
        statistics.median(row["ranks"][rank]["sent"] for row in rows if row["microbatches"] == count * m)
        for count in (counts[0], counts[-1])
    )
    return float(most - least) / (counts[-1] - counts[0])


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


def print_ratio(rows: Sequence[dict[str, Any]], case: Case) -> None:
    """Print the time with sharded gradients over that of replicas: the median of the rounds and an interval for it."""
    most = max(row["microbatches"] for row in rows)
    replicas, sharded = (
        [row["seconds"] for row in rows if row["arm"] == arm and row["microbatches"] == most] for arm in case.arms
    )
    for arm, seconds in zip(case.arms, (replicas, sharded), strict=True):
        print(f"{arm}: {1e3 * case.m / most * statistics.median(seconds):.0f} ms per batch")
    median, low, high = interval([a / b for a, b in zip(sharded, replicas, strict=True)])
    print(f"sharded / replicated: {median:.3f} ({low:.3f}, {high:.3f})")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="one round without limits of links, and no times")
    parser.add_argument("--levels", action="store_true", help="sharded gradients beside replicas, instead")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs=2, default=[2, 8], help="of the two runs of a turn")
    parser.add_argument("--links", nargs="+", default=["1 Gbit/s", "200 Mbit/s"], choices=list(LINKS))
    parser.add_argument("--summary", type=Path, nargs="+", help="print the times in these raw files instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if arguments.summary:
        rows = [row for path in arguments.summary for row in read_raw(path) if "arm" in row]
        print_times(rows, SHARDED, arguments.links)
        print_comparison(rows, SHARDED, arguments.links)
        return
    if reason := why_not():
        sys.exit(f"skipped: {reason}")
    links = ["1 Gbit/s"] if arguments.bytes else arguments.links
    if arguments.bytes:
        arguments.rounds = 1
    if arguments.levels:
        out = open_raw("sharded_levels", arguments.out)
        measure([REPLICATED], ["loopback"], arguments, out)
        print_ratio(read_raw(out), REPLICATED)
        return
    out = open_raw("sharded_links", arguments.out)
    measure(SHARDED, links, arguments, out)
    rows = read_raw(out)
    print_bytes(rows, SHARDED)
    if not arguments.bytes:
        print_times(rows, SHARDED, links)
        print_comparison(rows, SHARDED, links)


if __name__ == "__main__":
    main()
