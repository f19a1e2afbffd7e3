"""Measures the time to make, prove, print, read and simulate large schedules: 64 ranks, 512 and 1024 microbatches.

    python -m benchmarks.schedules

If the time is linear, twice the microbatches take twice as long. Raw data go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, describe_machine
from penstock.schedule.build import call_order
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.lowering.lower import lower
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.orders import ORDERS
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.apply_version_rule import apply_rule
from penstock.simulate.costs import Costs
from penstock.simulate.play import play

RESULTS = Path(__file__).parent / "results"


def measure(method: str, stages: int, microbatches: int) -> dict[str, Any]:
    """Return the seconds of every step, and the number of lowered instructions."""
    seconds: dict[str, float] = {}

    def timed(what: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = step()
        seconds[what] = time.perf_counter() - start
        return result

    row = find_method(method)
    order = timed("order", lambda: call_order(ORDERS[row.order], stages, microbatches))
    schedule = timed("rule", lambda: apply_rule(order, RULES[row.rule], microbatches, method))
    lowered = timed("lower", lambda: lower(schedule))
    timed("play", lambda: play(lowered, Costs.uniform(schedule), 1))
    timed("check", lambda: check(schedule))
    text = timed("print", lambda: str(schedule))
    timed("parse", lambda: parse_schedule(text))
    instructions = sum(len(part) for program in lowered.programs for part in program)
    return {
        "method": method,
        "stages": stages,
        "microbatches": microbatches,
        "instructions": instructions,
        "seconds": seconds,
    }


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print medians over the rounds as Markdown."""
    steps = list(rows[0]["seconds"])
    print("| schedule | instructions | " + " | ".join(f"{step} (s)" for step in steps) + " |")
    print("|---" * (len(steps) + 2) + "|")
    cases = {(r["method"], r["stages"], r["microbatches"], r["instructions"]): None for r in rows}
    for method, stages, microbatches, instructions in cases:
        here = [r["seconds"] for r in rows if (r["method"], r["microbatches"]) == (method, microbatches)]
        cells = [f"{statistics.median(s[step] for s in here):.2f}" for step in steps]
        print(f"| {method}, {stages} x {microbatches} | {instructions:,} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--methods", nargs="+", default=["1f1b", "2bw"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out / f"schedules-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl"
    rows = [
        measure(method, arguments.stages, microbatches)
        for _ in range(arguments.rounds)
        for method in arguments.methods
        for microbatches in arguments.microbatches
    ]
    lines = [{"machine": describe_machine(), "command": command_line("schedules")}, *rows]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_summary(rows)
    print(f"\nraw data: {out}")


if __name__ == "__main__":
    main()
