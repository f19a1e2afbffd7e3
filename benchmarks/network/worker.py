"""A rank of `benchmarks.links`: a process on one of the hosts, which makes arms and runs turns as it is told.

It reads commands from its standard input, a JSON object per line, and answers each on what was its standard output. It
ends with the benchmark. Its command line is a JSON object, too: `Place`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch.distributed as dist

from benchmarks.arms import Arm, PenstockArm, TorchArm
from benchmarks.machine import join
from benchmarks.network.arms import arms_of, case_named
from benchmarks.network.torch_passes import TorchPasses
from penstock.comm.core.trace_recorder import Recorder
from penstock.launch.signals import end_with_parent
from penstock.runtime.plan.adapted_in_flight import MEASURED


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        rank, ranks: of the process group.
        address, port: where all meet.
        interface: whose bytes it counts.
        parent: the process of the benchmark, with which this one ends.
    """

    rank: int
    ranks: int
    address: str
    port: int
    interface: str
    parent: int


class CpuClock:
    """Adds up what the thread of a rank takes of a core, for each kind of work and wait that is recorded.

    Args:
        recorder: of the rank, whose times it reads from now on.

    Attributes:
        seconds: by "stage:operation", or by the reason of a wait.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.seconds = defaultdict[str, float](float)
        self._at: dict[float, float] = {}
        self._add, self._add_work = recorder.add, recorder.add_work
        changed: Any = recorder
        changed.now = changed.begin = self._now
        changed.add, changed.add_work = self._wait, self._work

    def _now(self) -> float:
        now = time.perf_counter()
        self._at[now] = time.thread_time()
        return now

    def _wait(self, lane: str, start: float, end: float, what: str, *others: Any, **named: Any) -> None:
        if start in self._at:  # a transfer is recorded by another clock
            self.seconds[what] += time.thread_time() - self._at[start]
        self._add(lane, start, end, what, *others, **named)

    def _work(self, start: float, end: float, what: str, named: Any, stage: int, *others: Any) -> None:
        self.seconds[f"{stage}:{what}"] += self._at[end] - self._at[start]
        self._at.clear()  # no wait begins before work and ends behind it
        self._add_work(start, end, what, named, stage, *others)


class Worker:
    """The arms of one rank."""

    def __init__(self, place: Place) -> None:
        self._arms: dict[tuple[str, str, str], Arm] = {}
        self._cpu: dict[tuple[str, str, str], CpuClock] = {}
        self._passes: dict[tuple[str, str, str], TorchPasses] = {}
        self._counters = Path("/sys/class/net", place.interface, "statistics")

    def make(self, case: str, arms: list[str], link: str = "") -> dict[str, Any]:
        """Make arms of a case, and warm them up: allocators, optimizer state, shapes.

        Args:
            case: by its name.
            arms: by their names.
            link: the present one, for arms that are made once for each.
        """
        found = case_named(case)
        for name, arm in arms_of(found, tuple(arms)):
            self._arms[case, name, link] = arm
            if isinstance(arm, PenstockArm):
                self._cpu[case, name, link] = CpuClock(arm.pipeline._ranks[0].recorder)
            elif isinstance(arm, TorchArm):
                self._passes[case, name, link] = TorchPasses(arm)
            arm.run(max(4 // found.m, MEASURED + 2 if link else 2))
        return {}

    def turn(self, case: str, arm: str, batches: int, link: str = "") -> dict[str, Any]:
        """Run batches of an arm from a common start.

        Returns:
            seconds: on this rank; cpu: seconds of a core of all its threads; threads: the same of those that live
            longer than the turn, and for how long each was ready and had no core; sent, received: bytes of its
            interface, the barrier's included; of an arm of Penstock what its timeline says of the turn (`recorded`),
            and cores: seconds of a core by kind of work and wait (`CpuClock`); of a pipeline of torch its work, too.
        """
        engine, clock, passes = (of.get((case, arm, link)) for of in (self._arms, self._cpu, self._passes))
        assert isinstance(engine, Arm)
        before = self._bytes()
        dist.barrier()
        start, cpu, threads = time.perf_counter(), time.process_time(), thread_seconds()
        if clock is not None:
            clock.seconds.clear()
        if passes is not None:
            passes.clear()
        engine.run(batches)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        changed = {
            name: [now - then for now, then in zip(each, threads.get(name, (0.0, 0.0)), strict=True)]
            for name, each in thread_seconds().items()
        }
        dist.barrier()  # so that nothing of this turn is under way when the link changes
        sent, received = (now - then for now, then in zip(self._bytes(), before, strict=True))
        counted = {"seconds": seconds, "cpu": cpu, "threads": changed, "sent": sent, "received": received}
        found = {**counted, **recorded(engine, start)}
        if passes is not None:
            found["work"] = passes.work()
        return found if clock is None else {**found, "cores": dict(clock.seconds)}

    def close(self) -> dict[str, Any]:
        """Finish everything that is in flight."""
        for arm in self._arms.values():
            arm.close()
        dist.barrier()
        return {}

    def _bytes(self) -> tuple[int, int]:
        sent, received = (int((self._counters / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
        return sent, received


def thread_seconds() -> dict[str, tuple[float, float]]:
    """Return what each thread of this process has taken of a core, and how long it was ready and had none.

    Threads that are not of Python, such as those of gloo, and those of one name count together.
    """
    names, found = {thread.native_id: thread.name for thread in threading.enumerate()}, dict[str, tuple[float, float]]()
    for task in Path("/proc/self/task").iterdir():
        try:
            taken, ready, _ = (task / "schedstat").read_text().split()
        except FileNotFoundError:  # it has ended
            continue
        name = names.get(int(task.name), "others")
        before = found.get(name, (0.0, 0.0))
        found[name] = before[0] + int(taken) / 1e9, before[1] + int(ready) / 1e9
    return found


def recorded(engine: Arm, start: float) -> dict[str, Any]:
    """What the recorder of an arm of Penstock has of the time since `start`; nothing of another arm.

    Returns:
        work: "stage:operation" -> number and mean seconds; waits: reason -> seconds in all; messages: lane (and, of
        collectives, the operation) -> number, and mean and median seconds from posting to completion; activations: the
        most microbatches in flight, per rank; of a pipeline that has measured its link, in_flight: what it found.
        The timeline itself would be gathered over the link.
    """
    if not isinstance(engine, PenstockArm):
        return {}
    (state,) = engine.pipeline._ranks
    work, messages, waits = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list), {}
    for entry in reversed(state.recorder._entries):
        if len(entry) <= 3:  # a change of memory
            continue
        _, lane, begun, ended, what, _, stage, *_ = entry
        if lane == "compute" and ended < start:  # transfers are recorded some time after their end
            break
        if lane != "compute" and begun >= start:
            messages[lane if lane != "collective" else f"collective {what}"].append(ended - begun)
        elif lane == "compute" and what.isupper():
            work[f"{stage}:{what}"].append(ended - begun)
        elif lane == "compute":
            waits[what] = waits.get(what, 0.0) + ended - max(begun, start)
    return {
        "work": {name: [len(times), sum(times) / len(times)] for name, times in work.items()},
        "waits": waits,
        "messages": {
            lane: [len(times), sum(times) / len(times), sorted(times)[len(times) // 2]]
            for lane, times in messages.items()
        },
        "activations": [float(held) for held in engine.pipeline.proof.activations],
        **({"in_flight": str(engine.pipeline.in_flight)} if engine.pipeline.in_flight else {}),
    }


def serve(worker: Worker, answers: TextIO) -> None:
    """Obey until the input ends; an error is an answer, too."""
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = json.dumps(getattr(worker, command.pop("do"))(**command))
        except Exception:
            answer = json.dumps({"error": traceback.format_exc()})
        answers.write(answer + "\n")
        answers.flush()


def serve_as(kind: type[Worker]) -> None:
    """Join the others, and serve."""
    place = Place(**json.loads(sys.argv[1]))
    end_with_parent()
    if os.getppid() != place.parent:  # it ended while this process was importing
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    join(place.rank, place.port, place.ranks, place.address)
    worker = kind(place)
    try:
        serve(worker, answers)
    finally:
        os._exit(0)  # a stream that is not drained would wait for its peers; what failed has been answered


if __name__ == "__main__":
    serve_as(Worker)
