"""Trains many tiny batches and says whether anything grows with their number: memory, objects, files, threads.

    python -m tools.soak                              # 50,000 batches, in one process and in two
    python -m tools.soak --batches 2000 --method 1f1b
    make soak ARGS="--batches 10000"

Twenty samples are taken after a warm-up of a fifth of the batches, in which the timeline of the run fills its window
(of as many entries as there are batches) and allocators find their size. Objects that the garbage collector knows,
entries of the timeline, threads and open files must not be more in all of the second half of the samples than in the
first half, but for two of it. Resident memory may grow in the second half by `SLACK` bytes a batch and rank, and
`NOISE` besides. The exit code is 1 if something grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F

from penstock import Checkpoints, Evaluating, Pipeline
from penstock.comm.core.trace_recorder import KEEP

METHODS = ("1f1b", "2bw")
RANKS, MICROBATCHES = 2, 2
SLACK, NOISE = 32, 256 << 10  # bytes per batch and rank, and bytes: what allocators lose by chance
_SAMPLES = 20


class Usage(NamedTuple):
    """What one process holds.

    Attributes:
        batch: after how many batches.
        resident: bytes of memory.
        objects: that were made since the beginning, but for the evaluations that a pipeline remembers.
        entries: of the recorders' windows.
        threads: of this process.
        files: open descriptors.
    """

    batch: int
    resident: int
    objects: int
    entries: int
    threads: int
    files: int


def usage(batch: int, pipeline: Pipeline) -> Usage:
    """Count, after a collection of garbage."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    entries = sum(len(state.recorder._entries) for state in pipeline._ranks)
    files = len(os.listdir("/proc/self/fd"))
    kept = sum(len(state.decisions.events.evaluations) for state in pipeline._ranks)  # by contract
    return Usage(batch, resident, len(gc.get_objects()) - kept, entries, threading.active_count(), files)


def soak(
    method: str, batches: int, group: dist.ProcessGroup | None, folder: Path, every: int, window: int = KEEP
) -> list[Usage]:
    """Train so many batches, with checkpoints and evaluations, and count what this process holds on the way.

    Args:
        method: of the schedule.
        batches: to train.
        group: of two processes, or None for one with both ranks.
        folder: for checkpoints.
        every: batches between two checkpoints, and two evaluations.
        window: entries of the timeline that each rank keeps at most.
    """
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4) for _ in range(RANKS)]
    pipeline = Pipeline(
        blocks, method=method, stages=RANKS, microbatches=MICROBATCHES, loss=F.mse_loss, group=group,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), max_grad_norm=1.0,
    )  # fmt: skip
    for state in pipeline._ranks:
        state.recorder._entries = deque(maxlen=min(window, batches))  # full after the warm-up
    batch = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(MICROBATCHES)]
    checkpoints = Checkpoints(pipeline, folder)
    begin = batches // 5
    moments = {begin + (batches - begin - 1) * i // (_SAMPLES - 1) for i in range(_SAMPLES)}
    data, found = (batch for _ in range(batches)), list[Usage]()
    gc.freeze()  # what is there already is neither looked through nor counted
    try:
        for report in pipeline.run(data, save=checkpoints.every(every), evaluate=Evaluating(every, lambda: [batch])):
            if report.batch in moments:
                now = usage(report.batch, pipeline)
                found.append(now._replace(objects=now.objects - len(found)))  # they are objects themselves
    finally:
        gc.unfreeze()
    checkpoints.save()  # waits for the last one
    return found


def growth(found: Sequence[Usage], ranks: int) -> list[str]:
    """What grows from sample to sample, in words.

    Args:
        found: samples of one process.
        ranks: of this process.
    """
    first, last = found[0], found[-1]
    grown = [
        f"{name}: {getattr(first, name)} after {first.batch} batches, {getattr(last, name)} after {last.batch}"
        for name in ("objects", "entries", "threads", "files")
        if getattr(last, name) > getattr(first, name) and _rises([getattr(one, name) for one in found])
    ]
    middle = found[len(found) // 2]  # the first samples fill memory themselves
    rate = (last.resident - middle.resident - NOISE) / (last.batch - middle.batch) / ranks
    if rate > SLACK:
        grown.append(f"resident memory: {rate:.0f} bytes per batch and rank, {SLACK} are allowed")
    return grown


def _rises(values: Sequence[int]) -> bool:
    """Whether the second half lies above the first, but for two: what goes up and down does so once in 2,800 times."""
    half = len(values) // 2
    return min(values[half:]) > sorted(values[:half])[-3]


def _join(rank: int, method: str, batches: int, folder: str, every: int, out: Path | None) -> None:
    """One of the two processes: it prints its own samples, and fails if something grows."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    found = soak(method, batches, dist.group.WORLD, Path(folder), every)
    grown = _told(f"{method}, process {rank}", found, 1, out)
    dist.destroy_process_group()
    if grown:
        sys.exit(1)


def _told(name: str, found: Sequence[Usage], ranks: int, out: Path | None) -> list[str]:
    print(f"{name}\n" + "".join(f"  {one}\n" for one in found), end="")
    grown = growth(found, ranks)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps({"run": name, "grown": grown, "samples": [one._asdict() for one in found]}) + "\n")
    print(f"  {'; '.join(grown) or 'nothing grows'}", flush=True)
    return grown


def _runs(methods: Sequence[str], batches: int, every: int, out: Path | None = None) -> Iterator[bool]:
    """Whether something grew: of every method, in one process and in two."""
    for method in methods:
        with TemporaryDirectory() as folder:
            found = soak(method, batches, None, Path(folder), every)
            yield bool(_told(f"{method}, one process", found, RANKS, out))
        with TemporaryDirectory() as folder:
            arguments = (method, batches, folder, every, out)
            try:
                multiprocessing.start_processes(_join, arguments, RANKS, start_method="spawn")
                yield False
            except multiprocessing.ProcessExitedException:  # the other one is ended, too
                yield True


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50_000, help="to train in each run")
    parser.add_argument("--every", type=int, help="batches between two checkpoints; a hundredth of all if left out")
    parser.add_argument("--method", action="append", choices=METHODS, help="one of them; both if left out")
    parser.add_argument("--out", type=Path, help="append the samples of every run to this file, as a line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = options.every or max(options.batches // 100, 1)  # the first one starts threads, so well before the samples
    return int(any([*_runs(options.method or METHODS, options.batches, every, options.out)]))


if __name__ == "__main__":
    sys.exit(main())
