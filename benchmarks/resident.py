"""What ranks take of the machine's memory beside what the memory ledger says, with replicas and with sharded state.

    python -m benchmarks.resident

Two pipelines of two ranks, in four fresh processes for every run. A rank first trains a tiny model and multiplies
matrices of the size of the large model's, so that libraries, threads and connections are there; what it takes is the
most resident memory of the large model's making and training, less what it had before. Each arm trains with freed
memory kept (as `penstock train` does) and with it given back (`keep_freed_memory: false`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F

import penstock
from benchmarks.machine import free_port, join
from benchmarks.throughput import RESULTS, open_raw
from penstock.runtime.malloc import SMALL

STAGES, WIDTH, MICROBATCHES, SAMPLES = 2, 2, 4, 32
TINY = 8
_PATIENCE = 300  # seconds


class Arm(NamedTuple):
    """A configuration of two pipelines.

    Attributes:
        method, chunks: of the schedule.
        sharding: of state; None if the method brings it.
    """

    method: str
    chunks: int = 1
    sharding: str | None = None

    def __str__(self) -> str:
        """Its name."""
        return f"{self.method}, sharding {self.sharding}" if self.sharding else self.method


class Run(NamedTuple):
    """What is trained, and how.

    Attributes:
        size: of the large model: numbers of a row of its matrices.
        blocks: how many it has.
        batches: after the first one.
        keeps: freed memory is kept.
        limit: bytes that a rank may take besides what it has before, as the kernel counts data; None for no limit.
    """

    size: int
    blocks: int
    batches: int
    keeps: bool
    limit: float | None = None


PAIRS = (
    (Arm("2bw", sharding="none"), Arm("2bw", sharding="gradients")),
    (Arm("breadth-first", 4, "none"), Arm("layered", 4)),
)
"""Each: replicated, and sharded."""


class Layer(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return x + F.gelu(self.linear(x))


def make_pipeline(arm: Arm, width: int, blocks: int) -> penstock.Pipeline:
    """Make the pipeline of this rank; no process has more of the model than its stages."""
    stages = STAGES * arm.chunks
    options: dict[str, Any] = {} if arm.chunks == 1 else {"chunks": arm.chunks}
    return penstock.Pipeline(
        [penstock.LazyBlock(partial(Layer, width), seed, cost=1.0) for seed in range(blocks)],
        method=penstock.method(arm.method, **options),
        stages=STAGES,
        microbatches=MICROBATCHES,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        partition=[blocks // stages] * stages,
        data_parallel=penstock.DataParallel(WIDTH, sharding=arm.sharding),
        group=dist.group.WORLD,
    )


def make_data(count: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """Random batches, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SAMPLES * MICROBATCHES * WIDTH, width, generator=generator) for _ in range(count)]
    return [(x, x.roll(1, 1)) for x in inputs]


def work(rank: int, port: int, arm: Arm, run: Run, report: Callable[[Any], None]) -> None:
    """Train on one rank, and report what it took, or why it ended."""
    try:
        join(rank, port, STAGES * WIDTH)
        if not run.keeps:
            penstock.keep_freed_memory(SMALL)
        report(_measure(rank, arm, run))
        dist.barrier()
    except BaseException as error:  # whatever it is, the parent prints it
        notes = "; ".join(getattr(error, "__notes__", ()))
        report({"rank": rank, "error": f"{type(error).__name__}: {str(error).splitlines()[0]:.300} {notes}"})
    finally:
        os._exit(0)  # the other ranks may be gone


def _measure(rank: int, arm: Arm, run: Run) -> dict[str, Any]:
    list(make_pipeline(arm, TINY, arm.chunks * STAGES).run(make_data(2, TINY)))
    samples, weights = torch.ones(SAMPLES, run.size), torch.ones(run.size, run.size)
    samples.T @ (samples @ weights)
    data = make_data(1 + run.batches, run.size)
    del samples, weights
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the highest resident size
    before = status("VmRSS")
    if run.limit is not None:
        room = int(status("VmData") + run.limit)
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    pipeline = make_pipeline(arm, run.size, run.blocks)
    list(pipeline.run(data[:1]))
    start = time.perf_counter()
    list(pipeline.run(data[1:]))
    seconds = (time.perf_counter() - start) / run.batches
    ledger = next(iter(pipeline.peak_bytes().values()))["total"]
    return {"rank": rank, "ledger": ledger, "resident": status("VmHWM") - before, "seconds": seconds}


def status(field: str, pid: int | str = "self") -> int:
    """Read a memory figure of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/{pid}/status")


def train(arm: Arm, run: Run) -> list[dict[str, Any]]:
    """Train in fresh processes; returns what each rank has reported, up to the first that has failed."""
    context, port, processes, waiting = multiprocessing.get_context("spawn"), free_port(), [], []
    for rank in range(STAGES * WIDTH):
        mine, theirs = context.Pipe()
        waiting.append(mine)
        processes.append(context.Process(target=work, args=(rank, port, arm, run, theirs.send)))
        processes[-1].start()
    found: list[dict[str, Any]] = []
    while waiting and not any("error" in row for row in found):
        ready = wait(waiting, _PATIENCE)
        if not ready:
            found.append({"error": f"no rank has said anything for {_PATIENCE} s"})
        for each in ready:
            found.append(each.recv())
            waiting.remove(each)
    for process in processes:
        if waiting:
            process.kill()  # they wait for the one that has ended
        process.join()
    return found


def add_row(out: Path, row: dict[str, Any]) -> None:
    """Add a row to the raw data."""
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def measure(arms: Sequence[Arm], run: Run, rounds: int, out: Path) -> None:
    """Measure, and print what was found."""
    print("| arm | freed memory | ledger, MB | resident, MB | resident / ledger | ms per batch |")
    print("|---|---|---|---|---|---|")
    for arm in arms:
        for keeps in (True, False):
            rows: list[dict[str, Any]] = []
            for round_ in range(rounds):
                found = train(arm, run._replace(keeps=keeps))
                add_row(out, {"arm": str(arm), "keeps": keeps, "round": round_, "ranks": found})
                rows += found
            if any("error" in row for row in rows):
                raise RuntimeError(f"{arm} has failed: {[row['error'] for row in rows if 'error' in row]}")
            ledger, resident = (statistics.median(row[what] / 1e6 for row in rows) for what in ("ledger", "resident"))
            shares = sorted(row["resident"] / row["ledger"] for row in rows)
            share = f"{statistics.median(shares):.3f} ({shares[0]:.3f} .. {shares[-1]:.3f})"
            milliseconds = 1e3 * statistics.median(row["seconds"] for row in rows)
            kept = "kept" if keeps else "given back"
            print(f"| {arm} | {kept} | {ledger:.0f} | {resident:.0f} | {share} | {milliseconds:.0f} |", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this benchmark and `benchmarks.memory_limits` both ask for."""
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--size", type=int, default=1024, help="numbers of a row of the matrices of the model")
    parser.add_argument("--blocks", type=int, default=48, help="of the model, a multiple of 8")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser)
    arguments = parser.parse_args()
    run = Run(arguments.size, arguments.blocks, arguments.batches, keeps=True)
    out = open_raw("resident", arguments.out)
    measure([arm for pair in PAIRS for arm in pair], run, arguments.rounds, out)
    print(f"\nraw data: {out}")


if __name__ == "__main__":
    main()
