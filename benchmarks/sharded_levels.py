"""What sharded gradients cost 2bw: its time beside that with replicas, two pipelines of two ranks on the loopback.

python -m benchmarks.sharded_levels              # needs a quiet machine, and root on Linux
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.network.arms import REPLICATED, Case
from benchmarks.network.hosts import why_not
from benchmarks.network.sharded_rounds import measure
from benchmarks.throughput import RESULTS, interval, open_raw, read_raw


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
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=6, help="of a turn")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(f"skipped: {reason}")
    out = open_raw("sharded_levels", arguments.out)
    measure([REPLICATED], ["loopback"], [arguments.batches], arguments.rounds, out)
    print_ratio(read_raw(out), REPLICATED)


if __name__ == "__main__":
    main()
