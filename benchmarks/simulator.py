"""Measures the simulators: a span played by the object machine, compiled, and evaluated for one cost and for many.

    python -m benchmarks.simulator --stages 64 --microbatches 1024

Schedules are built and lowered with a window of 2 (or `--window`), not proven. Raw data go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, describe_machine
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.machine.lower import lower
from penstock.simulate.costs import Costs
from penstock.simulate.predict import CompiledSpan
from penstock.simulate.simulate import play

RESULTS = Path(__file__).parent / "results"


def varied_costs(base: Costs, count: int) -> Iterator[Costs]:
    """Yield costs of which no two are alike."""
    for i in range(count):
        stages = tuple(type(s)(*(time * (1 + i / 97) for time in vars(s).values())) for s in base.stages)
        yield Costs(stages, latency=0.01 * i)


def measure(method: str, stages: int, microbatches: int, count: int, window: int | None) -> dict[str, Any]:
    """Return the seconds of every step, and the sizes of the graph."""
    seconds: dict[str, float] = {}

    def timed(what: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = step()
        seconds[what] = round(time.perf_counter() - start, 3)
        return result

    schedule = timed("build", lambda: ScheduleRequest(method, stages, microbatches).schedule)
    lowered = timed("lower", lambda: lower(schedule, window=window))
    span = timed("compile", lambda: CompiledSpan(lowered))
    costs = Costs.uniform(schedule)
    bubbles = timed("one cost", lambda: span.bubbles([costs]))
    timed(f"{count} costs", lambda: span.bubbles(list(varied_costs(costs, count))))
    gigabytes = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    timeline, _ = timed("play", lambda: play(lowered, costs, 1))
    return {
        "method": method,
        "stages": stages,
        "microbatches": microbatches,
        "window": lowered.window,
        "events": span.events,
        "steps": span.steps,
        "seconds": seconds,
        "peak_gb_before_play": gigabytes,
        "equal": vars(bubbles[0]) == vars(timeline.bubble()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=["1f1b", "2bw", "interleaved", "zb-v"])
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--costs", type=int, default=100)
    parser.add_argument("--window", type=int, help="breadth-first waits for ever with the least, 2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    path = arguments.out / f"simulator-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl"
    with path.open("w") as file:
        file.write(json.dumps({"command": command_line("simulator"), **describe_machine()}) + "\n")
        for method in arguments.methods:
            found = measure(method, arguments.stages, arguments.microbatches, arguments.costs, arguments.window)
            file.write(json.dumps(found) + "\n")
            file.flush()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
