"""How long sharded parallel pipelines take on links of several rates, beside the simulator.

    python -m benchmarks.sharded_links               # needs a quiet machine, and root on Linux
    python -m benchmarks.sharded_links --microbatches 2 --arms "penstock layered x 2" "torch looped bfs, fsdp2 x 2"
    python -m benchmarks.sharded_links --summary FILE ...

Four hosts, as in `benchmarks.links`: two pipelines of two ranks with four stages each, every stage a layer. Compared
are breadth-first on fully sharded state (`layered`), depth-first on fully sharded state, breadth-first with replicas,
and torch's `ScheduleLoopedBFS` over `fully_shard`. `benchmarks.sharded_bytes` counts what they send.

Times are compared with those of the simulator, given the passes that were measured, and step by step what shares a link
or a core (`benchmarks.network.sharded_compare`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.network.arms import SHARDED, Case
from benchmarks.network.hosts import LINKS, why_not
from benchmarks.network.sharded_compare import print_comparison
from benchmarks.network.sharded_rounds import measure
from benchmarks.throughput import RESULTS, interval, open_raw, read_raw


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


def print_ratios(rows: Sequence[dict[str, Any]], cases: Sequence[Case], links: Sequence[str]) -> None:
    """Print the time of every other arm over that of the first, within a round: the median and an interval for it."""
    seconds = {
        (r["case"], r["link"], r["round"], r["arm"]): r["seconds"] / r["microbatches"]
        for r in sorted(rows, key=lambda r: r["microbatches"])
    }
    print(f"\ntime over that of {cases[0].arms[0]}, within rounds")
    for case in cases:
        for arm in case.arms[1:]:
            for link in links:
                pairs = [
                    (seconds[case.name, link, round_, arm], seconds.get((case.name, link, round_, case.arms[0])))
                    for name, at, round_, other in seconds
                    if (name, at, other) == (case.name, link, arm)
                ]
                ratios = [other / first for other, first in pairs if first is not None]
                if ratios:
                    median, low, high = interval(ratios)
                    print(f"{arm}, m = {case.m}, {link}: {median:.3f} ({low:.3f}, {high:.3f}), {len(ratios)} rounds")


def main() -> None:
    """Measure, or say what earlier runs have found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=4, help="of a turn")
    parser.add_argument("--links", nargs="+", default=["1 Gbit/s", "200 Mbit/s"], choices=list(LINKS))
    arms = SHARDED[0].arms
    parser.add_argument("--arms", nargs="+", default=list(arms), choices=arms, metavar="ARM", help="; ".join(arms))
    counts = [case.m for case in SHARDED]
    parser.add_argument("--microbatches", type=int, nargs="+", default=counts, choices=counts, help="m")
    parser.add_argument("--summary", type=Path, nargs="+", help="print the times in these raw files instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    cases = [case._replace(arms=tuple(arguments.arms)) for case in SHARDED if case.m in arguments.microbatches]
    cores = os.cpu_count() or 1
    if arguments.summary:
        cores = min(json.loads(path.read_text().splitlines()[0])["machine"]["cores"] for path in arguments.summary)
        rows = [
            {**row, "round": (path.name, row["round"])}
            for path in arguments.summary
            for row in read_raw(path)
            if "arm" in row
        ]
    elif reason := why_not():
        sys.exit(f"skipped: {reason}")
    else:
        out = open_raw("sharded_links", arguments.out)
        measure(cases, arguments.links, [arguments.batches], arguments.rounds, out)
        rows = read_raw(out)
    print_times(rows, cases, arguments.links)
    print_ratios(rows, cases, arguments.links)
    print_comparison(rows, cases, arguments.links, cores)


if __name__ == "__main__":
    main()
