"""Measures how long schedules take to be made, that is built and proven, and simulated: for one cost and for many.

    python -m benchmarks.simulator --stages 64 --microbatches 1024

Times are seconds of processor time (user and system), the median of `--repeats`, each in a process of its own. `--play`
also plays the span on the object machine and compares the figures. Raw data go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, describe_machine
from penstock.schedule.add_options import extended
from penstock.schedule.build import ScheduleRequest, prove
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.simulate.compiled_span import CompiledSpan
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

RESULTS = Path(__file__).parent / "results"


def varied_costs(base: Costs, count: int) -> Iterator[Costs]:
    """Yield costs of which no two are alike."""
    for i in range(count):
        stages = tuple(type(s)(*(time * (1 + i / 97) for time in vars(s).values())) for s in base.stages)
        yield Costs(stages, latency=0.01 * i)


def make(method: str, stages: int, microbatches: int, recomputes: bool) -> Proof:
    """Build and prove a schedule."""
    if not recomputes:
        return prove(method, stages, microbatches)
    return check(extended(ScheduleRequest(method, stages, microbatches).schedule, recomputes=True))


def measure(method: str, stages: int, microbatches: int, recomputes: bool, count: int, plays: bool) -> dict[str, Any]:
    """Return the seconds of every step, and the sizes of the graph."""
    seconds: dict[str, float] = {}

    def timed(what: str, step: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = step()
        seconds[what] = round(time.process_time() - start, 3)
        return result

    proof = timed("make", lambda: make(method, stages, microbatches, recomputes))
    costs = Costs.uniform(proof.schedule)
    simulation = timed("simulate", lambda: simulate_schedule(proof, costs))
    span = timed("compile", lambda: CompiledSpan(simulation.lowered))
    timed("where the time goes", lambda: simulation.time_split)
    gigabytes = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    if count:
        timed(f"{count} costs", lambda: span.bubbles(list(varied_costs(costs, count))))
    found = {
        "method": method,
        "stages": stages,
        "microbatches": microbatches,
        "recomputes": recomputes,
        "window": simulation.window,
        "events": span.events,
        "seconds": seconds,
        "peak_gb_for_one_cost": gigabytes,
    }
    if plays:
        timeline = timed("play", lambda: simulation.timeline)
        found["equal"] = vars(simulation.bubble) == vars(timeline.bubble())
    return found


def median(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of several measurements, with the median of the seconds of every step, and all of them."""
    steps = found[-1]["seconds"]
    middle = {what: statistics.median(each["seconds"][what] for each in found) for what in steps}
    return {**found[-1], "seconds": middle, "repeats": [each["seconds"] for each in found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=["1f1b", "2bw", "interleaved", "breadth-first", "zb-v"])
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--recompute", action="store_true", help="with forwards that are run again")
    parser.add_argument("--costs", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--play", action="store_true", help="play each span on the object machine, too, and compare")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    path = arguments.out / f"simulator-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl"
    with path.open("w") as file:
        file.write(json.dumps({"command": command_line("simulator"), **describe_machine()}) + "\n")
        for method in arguments.methods:
            size = arguments.stages, arguments.microbatches, arguments.recompute
            runs = []
            for _ in range(arguments.repeats):
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    runs.append(pool.submit(measure, method, *size, arguments.costs, arguments.play).result())
            found = median(runs)
            file.write(json.dumps(found) + "\n")
            file.flush()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
