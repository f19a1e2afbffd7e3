"""What keeps 2BW from the ceiling: waiting for the slower rank, slower work, or messages.

    python -m benchmarks.limits --microbatches 2

The ceiling and 2BW take turns, as in `benchmarks.throughput`, and the time of every forward, backward and update is
kept. Then both lists of times are played again in the order of 2BW with messages that take no time. A rank that
happens to be slow for one microbatch makes the other one wait there, because the order leaves them no slack; two
processes that never talk only add up. So the time of 2BW is the ceiling's, times three factors:

    order     the ceiling's own times in the order of 2BW / the ceiling
    work      2BW's times in this order / the ceiling's times in this order
    messages  2BW as it ran / 2BW's times in this order
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from benchmarks.arms import STAGES, CeilingArm, Data, PenstockStream
from benchmarks.machine import free_port
from penstock import Timeline

T = TypeVar("T")
Times = dict[str, float]
"""Label of an action, such as "F3" -> seconds."""
KINDS = ("F", "B", "STEP")


class TimedCeiling(CeilingArm):
    """The ceiling, with the time of everything it does."""

    def __init__(self, microbatches: int, data: Data) -> None:
        super().__init__(microbatches, data)
        self.times: Times = {}
        self._counts = dict.fromkeys(KINDS, 0)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Forward, and its time."""
        return self._timed("F", lambda: super(TimedCeiling, self).forward(inputs, targets))

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """Backward, and its time."""
        self._timed("B", lambda: super(TimedCeiling, self).backward(output, gradient))

    def update(self) -> None:
        """Update, and its time."""
        self._timed("STEP", super().update)

    def _timed(self, kind: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.times[f"{kind}{self._counts[kind]}"] = time.perf_counter() - start
        self._counts[kind] += 1
        return result


def replay(orders: Sequence[Sequence[str]], times: Sequence[Times]) -> float:
    """Seconds that two ranks need for their actions in these orders, with messages that take no time."""
    done: list[Times] = [{}, {}]
    clocks, places = [0.0, 0.0], [0, 0]
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                label = order[places[rank]]
                waits = label.startswith("F" if rank else "B")
                if waits and label not in done[1 - rank]:
                    break
                begin = max(clocks[rank], done[1 - rank][label] if waits else 0.0)
                clocks[rank] = done[rank][label] = begin + times[rank][label]
                places[rank] += 1
        if places == before:
            raise ValueError(f"ranks wait for each other at {places}")
    return max(clocks)


def work_of(timeline: Timeline, rank: int) -> Times:
    """Seconds of every action of a rank, in its order."""
    return {i.label: i.end - i.start for i in timeline.work(rank) if i.what in KINDS}


def factors(ceiling: Sequence[Times], pipeline: Sequence[Times], seconds: float) -> dict[str, float]:
    """Order, work and messages, and what they multiply to."""
    orders = [list(times) for times in pipeline]
    alone = max(sum(times.values()) for times in ceiling)
    ordered, worked = replay(orders, ceiling), replay(orders, pipeline)
    parts = {"order": ordered / alone, "work": worked / ordered, "messages": seconds / worked}
    return parts | {"in all": seconds / alone}


def measure(rank: int, port: int, m: int, count: int, size: int) -> None:
    """One rank: both arms in turns; rank 0 prints."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=STAGES)
    data = Data()
    ceiling, stream = TimedCeiling(m, data), PenstockStream("2bw", m, data)
    seconds = 0.0
    for _ in range(count // size):
        for arm in (ceiling, stream):
            dist.barrier()
            start = time.perf_counter()
            arm.run(size // m)
            seconds += time.perf_counter() - start if arm is stream else 0.0
    stream.close()
    timeline = stream.pipeline.timeline()
    boxes: list[tuple[Times, float]] = [({}, 0.0)] * STAGES
    dist.all_gather_object(boxes, (ceiling.times, seconds))
    if rank == 0:
        alone = [times for times, _ in boxes]
        everything = [work_of(timeline, r) for r in range(STAGES)]  # also what was drained after the last measurement
        own = [{label: t for label, t in times.items() if label in alone[0]} for times in everything]
        print_table(m, alone, own, factors(alone, own, max(s for _, s in boxes)))
    dist.barrier()
    dist.destroy_process_group()


def print_table(m: int, ceiling: Sequence[Times], own: Sequence[Times], parts: dict[str, float]) -> None:
    """Mean times per kind of work, and the factors."""
    print(f"m = {m}, mean milliseconds of rank 0 and rank 1: the ceiling, 2BW")
    for kind in KINDS:
        means = [
            sum(found := [t for label, t in times.items() if label.startswith(kind)]) / len(found)
            for times in (*ceiling, *own)
        ]
        print(f"{kind:>8}  " + "  ".join(f"{1e3 * mean:6.1f}" for mean in means))
    print("time of 2BW / time of the ceiling")
    for name, factor in parts.items():
        print(f"{name:>8}  {factor:6.3f}")


def main() -> None:
    """Run it for every m."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16], help="values of m")
    parser.add_argument("--count", type=int, default=512, help="microbatches per arm")
    parser.add_argument("--slice", type=int, default=32, help="microbatches that an arm runs at a time")
    arguments = parser.parse_args()
    for m in arguments.microbatches:
        multiprocessing.spawn(measure, (free_port(), m, arguments.count, arguments.slice), nprocs=STAGES)


if __name__ == "__main__":
    main()
