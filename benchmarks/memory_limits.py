"""Whether replicas end and sharded state trains under a limit of memory that the kernel keeps.

    python -m benchmarks.memory_limits

Arms, model and processes are those of `benchmarks.resident`, with freed memory given back. The limit of a pair is 95 %
of what the ledger of its replicated arm says, on top of what a process has before the large model is made: RLIMIT_DATA,
with which allocations fail.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.resident import PAIRS, Run, add_arguments, add_row, train
from benchmarks.throughput import open_raw

OF_REPLICATED = 0.95  # the limit of a pair


def measure(run: Run, out: Path) -> None:
    """Train without a limit and with one, and print what happened."""
    print("| arm | ledger, MB | limit, MB | what happened |\n|---|---|---|---|")
    for pair in PAIRS:
        limit = None
        for arm in pair:
            free = train(arm, run)
            add_row(out, {"arm": str(arm), "limit": None, "ranks": free})
            ledger = max(row["ledger"] for row in free)
            limit = limit or OF_REPLICATED * ledger
            found = train(arm, run._replace(limit=limit))
            add_row(out, {"arm": str(arm), "limit": limit, "ranks": found})
            said = found[-1].get("error", f"trained {1 + run.batches} batches")
            print(f"| {arm} | {ledger / 1e6:.0f} | {limit / 1e6:.0f} | {said} |", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    out = open_raw("memory_limits", arguments.out)
    measure(Run(arguments.size, arguments.blocks, arguments.batches, keeps=False), out)
    print(f"\nraw data: {out}")


if __name__ == "__main__":
    main()
