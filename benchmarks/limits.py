"""Explains the gap between 2BW and the ceiling: waiting for the slower rank, slower work, or messages.

    python -m benchmarks.limits --microbatches 2 --method 2bw-eager

The ceiling and 2BW take turns, as in `benchmarks.throughput`, and the time of every forward, backward and update is
recorded. Then both lists of times are replayed in the order of 2BW with messages that take no time. A rank that happens
to be slow for one microbatch delays the other one there, because the order leaves them no slack; in the ceiling two
processes never communicate, so their times only add up. The time of 2BW is that of the ceiling times three factors:

    order     the ceiling's own times in the order of 2BW / the ceiling
    work      2BW's times in this order / the ceiling's times in this order
    messages  2BW as measured / 2BW's times in this order; includes the halts between slices, about a forward each
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, multiprocessing

from benchmarks.arms import STAGES, CeilingArm, Data, PenstockStream
from benchmarks.machine import free_port, join, leave
from benchmarks.throughput import time_run
from penstock import Timeline
from penstock.schedule.machine.instructions import Lowered
from penstock.schedule.machine.play import Machine

T = TypeVar("T")
Times = dict[str, list[float]]
"""F, B or STEP -> the seconds of each occurrence, in order."""
KINDS = ("F", "B", "STEP")


class TimedCeiling(CeilingArm):
    """The ceiling, recording the time of every forward, backward and update."""

    def __init__(self, microbatches: int, data: Data) -> None:
        super().__init__(microbatches, data)
        self.times: Times = {kind: [] for kind in KINDS}

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run and time a forward."""
        return self._timed("F", lambda: super(TimedCeiling, self).forward(inputs, targets))

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """Run and time a backward."""
        self._timed("B", lambda: super(TimedCeiling, self).backward(output, gradient))

    def update(self) -> None:
        """Run and time an update."""
        self._timed("STEP", super().update)

    def _timed(self, kind: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.times[kind].append(time.perf_counter() - start)
        return result


def replay(lowered: Lowered, times: Sequence[Times]) -> float:
    """Return the seconds that a span takes with these times of each rank and messages that take no time."""
    supply = {(rank, kind): iter(taken) for rank, kinds in enumerate(times) for kind, taken in kinds.items()}
    machine = Machine(lowered, lambda action: next(supply[action.stage.rank, action.op.value]))
    machine.play(len(times[0]["STEP"]))
    return max(machine.clock)


def work_of(timeline: Timeline, rank: int, like: Times) -> Times:
    """Return the seconds of the first actions of a rank, as many of each kind as in `like`."""
    work = timeline.work(rank)
    return {kind: [i.end - i.start for i in work if i.what == kind][: len(like[kind])] for kind in KINDS}


def factors(lowered: Lowered, ceiling: Sequence[Times], pipeline: Sequence[Times], seconds: float) -> dict[str, float]:
    """Return the factors order, work and messages, and their product."""
    alone = max(sum(map(sum, times.values())) for times in ceiling)
    ordered, worked = replay(lowered, ceiling), replay(lowered, pipeline)
    parts = {"order": ordered / alone, "work": worked / ordered, "messages": seconds / worked}
    return parts | {"in all": seconds / alone}


def measure(rank: int, port: int, method: str, m: int, count: int, size: int) -> None:
    """Measure both arms in turns on one rank; rank 0 prints."""
    join(rank, port, STAGES)
    data = Data()
    ceiling, stream = TimedCeiling(m, data), PenstockStream(method, m, data)
    seconds = 0.0
    for _ in range(count // size):
        time_run(ceiling, size // m)
        seconds += time_run(stream, size // m)
    stream.close()
    timeline = stream.pipeline.timeline()
    boxes: list[tuple[Times, float]] = [({}, 0.0)] * STAGES
    dist.all_gather_object(boxes, (ceiling.times, seconds))
    if rank == 0:
        alone = [times for times, _ in boxes]
        own = [work_of(timeline, r, alone[r]) for r in range(STAGES)]
        print_table(method, m, alone, own, factors(stream.pipeline.proof.lowered, alone, own, max(s for _, s in boxes)))
    leave()


def print_table(method: str, m: int, ceiling: Sequence[Times], own: Sequence[Times], parts: dict[str, float]) -> None:
    """Print mean times per kind of work, and the factors."""
    print(f"m = {m}, mean milliseconds of rank 0 and rank 1: the ceiling, {method}")
    for kind in KINDS:
        means = [statistics.fmean(times[kind]) for times in (*ceiling, *own)]
        print(f"{kind:>8}  " + "  ".join(f"{1e3 * mean:6.1f}" for mean in means))
    print(f"time of {method} / time of the ceiling")
    for name, factor in parts.items():
        print(f"{name:>8}  {factor:6.3f}")


def main() -> None:
    """Run the benchmark for every m."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16], help="values of m")
    parser.add_argument("--method", default="2bw", choices=["2bw", "2bw-eager"])
    parser.add_argument("--count", type=int, default=512, help="microbatches per arm")
    parser.add_argument("--slice", type=int, default=64, help="microbatches that an arm runs at a time")
    arguments = parser.parse_args()
    for m in arguments.microbatches:
        multiprocessing.spawn(
            measure, (free_port(), arguments.method, m, arguments.count, arguments.slice), nprocs=STAGES
        )


if __name__ == "__main__":
    main()
