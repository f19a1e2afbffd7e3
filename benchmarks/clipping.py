"""Measures the cost of clipping by the global norm in PipeDream-2BW: throughput with it / throughput without.

    python -m benchmarks.clipping

It uses the stages, data and optimizer of `benchmarks.throughput`. Both arms take turns within a round, in slices and in
random order, and ratios are taken within a round, because machines drift. Both are halted between their slices, at the
same cost, so slices may be shorter here. Bounds are those of a 95 % interval for the median. Raw data go to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.arms import Maker, PenstockStream
from benchmarks.throughput import MICROBATCH_COUNTS, RESULTS, collect, measure, summarise

CLIP = 1.0
WITHOUT, WITH = "2bw", f"2bw, clip = {CLIP:g}"
ARMS: dict[str, Maker] = {
    WITHOUT: lambda m, data: PenstockStream("2bw", m, data),
    WITH: lambda m, data: PenstockStream("2bw", m, data, CLIP),
}


def work(rank: int, port: int, arguments: argparse.Namespace, out: str) -> None:
    """Measure on one rank."""
    measure(rank, port, arguments, out, ARMS)


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print the ratio per m as Markdown."""
    print(f"\nthroughput / {WITHOUT}: median (95 % interval) of the rounds\n")
    table = summarise(rows, WITHOUT)
    print("| arm | " + " | ".join(f"m = {m}" for m in table) + " |")
    print("|---" * (len(table) + 1) + "|")
    cells = ["{:.3f} ({:.3f}, {:.3f})".format(*ratios[WITH]) for ratios in table.values()]
    print(f"| {WITH} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=128, help="microbatches per arm and round")
    parser.add_argument("--slice", type=int, default=32, help="microbatches that an arm runs at a time")
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(MICROBATCH_COUNTS), help="values of m")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    arguments.arms = list(ARMS)
    print_summary(collect("clipping", work, arguments))


if __name__ == "__main__":
    main()
