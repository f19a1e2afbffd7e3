"""Compares orders with torch.distributed.pipelining's own, on two ranks of one thread each.

    python -m benchmarks.orders

Rounds and ratios are as in `benchmarks.throughput`. Besides the ratio of each pair it prints how close each comes to
the limit of its order: its throughput over the ceiling's, divided by 1 - bubble of the simulated order (F = 1, B = 2).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arms import STAGES, CeilingArm, Data, Maker, PenstockArm, TorchArm
from benchmarks.throughput import RESULTS, collect, interval, measure, summarise
from penstock import Costs
from penstock.schedule.build import prove
from penstock.simulate.simulate import simulate_schedule

PAIRS = {
    "interleaved": "interleaved",
    "zb-interleaved": "zb-interleaved",
    "zb-v": "zbv",
    "dualpipe-v": "dualpipev",
    "zb-h1": "zb1p",
    "1f1b": "1f1b",
}
"""Penstock's method -> torch's schedule."""


def _penstock(method: str, m: int, data: Data) -> PenstockArm:
    return PenstockArm(method, m, data)


def _torch(name: str, m: int, data: Data) -> TorchArm:
    return TorchArm(name, m, data)


MAKERS: dict[str, Maker] = {
    "ceiling": CeilingArm,
    **{f"penstock {method}": partial(_penstock, method) for method in PAIRS},
    **{f"torch {name}": partial(_torch, name) for name in PAIRS.values()},
}


def allowed(method: str, m: int) -> float:
    """Return 1 - bubble of a simulated order."""
    proof = prove(method, STAGES, m)
    return 1.0 - simulate_schedule(proof, Costs.uniform(proof.schedule)).bubble.bubble


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print ratios of the measured pairs, and to the limits of the orders if the ceiling was measured, as Markdown."""
    names = rows[0]["seconds"].keys()
    ceilings = summarise(rows, "ceiling") if "ceiling" in names else {}
    print("| m | order | penstock / torch | penstock of allowed | torch of allowed |")
    print("|---|---|---|---|---|")
    for m in sorted({row["m"] for row in rows}):
        for method, name in PAIRS.items():
            arms = f"penstock {method}", f"torch {name}"
            if not {*arms} <= names:
                continue
            here = [row["seconds"] for row in rows if row["m"] == m]
            median, low, high = interval([s[arms[1]] / s[arms[0]] for s in here])
            pair = f"{median:.3f} ({low:.3f}, {high:.3f})"
            reached = [f"{ceilings[m][arm][0] / allowed(method, m):.3f}" if ceilings else "" for arm in arms]
            print(f"| {m} | {method} | {pair} | {reached[0]} | {reached[1]} |")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=64, help="microbatches per arm and round")
    parser.add_argument("--slice", type=int, default=16, help="microbatches that an arm runs at a time")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8], help="values of m")
    parser.add_argument("--arms", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    print_summary(collect("orders", partial(measure, makers=MAKERS), arguments))


if __name__ == "__main__":
    main()
