"""Measures throughput of Penstock, torch.distributed.pipelining and the ceiling, on two ranks of one thread each.

    python -m benchmarks.throughput            # one to two and a half hours on two cores
    python -m benchmarks.throughput --short    # minutes, for daily use

Every round runs every arm on at least 128 microbatches; ratios are taken within a round, because machines drift. The
arms take turns within a round, in slices of `--slice` microbatches and in random order, so that a slow minute affects
all of them, and no arm always follows the same other one. 2bw runs in one span, which is halted between its slices and
drained only at the end; a halt costs it about a forward, so slices should not be short. Bounds are those of a 95 %
interval for the median (`interval`). Raw data go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.arms import ARMS, STAGES, Arm, Data, Maker
from benchmarks.machine import command_line, describe_machine, free_port, join, leave

RESULTS = Path(__file__).parent / "results"
MICROBATCH_COUNTS = (2, 4, 8, 16)


def measure(
    rank: int,
    port: int,
    arguments: argparse.Namespace,
    out: str,
    makers: Mapping[str, Maker] = ARMS,
    make_data: Callable[[], Data] = Data,
    ranks: int = STAGES,
    part: str = "",
    backend: str = "gloo",
) -> None:
    """One rank: every m, round and arm in turn; rank 0 writes the times.

    Args:
        rank: this process.
        port: where all meet.
        arguments: of the command.
        out: file of the raw data.
        makers: of the arms.
        make_data: what they train on.
        ranks: processes.
        part: of the benchmark, for its raw data; none if empty.
        backend: of the process group.
    """
    join(rank, port, ranks, backend=backend)
    data, tag = make_data(), {"part": part} if part else {}
    for m in arguments.microbatches:
        batches = max(arguments.count // m, 1)
        arms = {name: makers[name](m, data) for name in arguments.arms}
        for arm in arms.values():
            arm.run(max(4 // m, 2))  # warm up: allocators, optimizer state, shapes
        for round_ in range(arguments.rounds):
            seconds = _round(arms, round_, batches, max(arguments.slice // m, 1))
            if rank == 0:
                with open(out, "a") as file:
                    row = tag | {"m": m, "round": round_, "microbatches": batches * m, "seconds": seconds}
                    file.write(json.dumps(row) + "\n")
                print(f"m={m} round {round_}: " + ", ".join(f"{n} {s:.2f} s" for n, s in seconds.items()), flush=True)
        for arm in arms.values():
            arm.close()
    leave()


def _round(arms: dict[str, Arm], round_: int, batches: int, size: int) -> dict[str, float]:
    """Return the seconds of every arm for `batches` batches, in slices of `size` batches.

    Each rank adds up its own slices, and the slower rank counts, so that an arm that never waits for its peer (the
    ceiling) is not charged for the slower rank of every slice.
    """
    seconds = dict.fromkeys(arms, 0.0)
    turns = random.Random(round_)  # the same on both ranks
    for first in range(0, batches, size):
        for name in turns.sample(list(arms), len(arms)):
            seconds[name] += time_run(arms[name], min(size, batches - first))
    slower = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slower, dist.ReduceOp.MAX)
    return dict(zip(seconds, slower.tolist(), strict=True))


def time_run(arm: Arm, batches: int) -> float:
    """Return the seconds of a run on this rank, from a common start."""
    dist.barrier()
    start = time.perf_counter()
    arm.run(batches)
    return time.perf_counter() - start


def summarise(rows: list[dict[str, Any]], base: str) -> dict[int, dict[str, tuple[float, float, float]]]:
    """Return, per m and arm, the median throughput ratio to `base`, and its bounds."""
    table: dict[int, dict[str, tuple[float, float, float]]] = {}
    for m in sorted({row["m"] for row in rows}):
        here = [row["seconds"] for row in rows if row["m"] == m]
        table[m] = {}
        for name in here[0]:
            table[m][name] = interval([seconds[base] / seconds[name] for seconds in here])
    return table


def interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the median of the rounds, and an interval that holds the true median with at least this confidence.

    Its ends are the k-th lowest and k-th highest ratio: the true median is below all but k - 1 of n rounds as often as
    n coins show fewer than k heads, whatever the distribution of the ratios. With 9 rounds k is 2. With fewer than 6
    there is no such interval, and the ends are the extremes.
    """
    ordered, n, k = sorted(ratios), len(ratios), 1
    while 2 * sum(math.comb(n, heads) for heads in range(k + 1)) / 2**n <= 1 - confidence:
        k += 1
    return statistics.median(ordered), ordered[k - 1], ordered[n - k]


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print ratios to the ceiling and to torch's 1F1B as Markdown."""
    for base in ("ceiling", "torch 1f1b"):
        if base not in rows[0]["seconds"]:
            continue
        table = summarise(rows, base)
        print(f"\nthroughput / {base}: median (95 % interval)\n")
        print("| arm | " + " | ".join(f"m = {m}" for m in table) + " |")
        print("|---" * (len(table) + 1) + "|")
        for name in rows[0]["seconds"]:
            cells = [f"{table[m][name][0]:.3f} ({table[m][name][1]:.3f}, {table[m][name][2]:.3f})" for m in table]
            print(f"| {name} | " + " | ".join(cells) + " |")


def collect(name: str, work: Callable[..., None], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a function on all ranks, and return the raw data, whose file begins with the machine and the command.

    Args:
        name: of the benchmark.
        work: (rank, port, arguments, out), such as `measure`.
        arguments: of the command.
    """
    out = open_raw(name, arguments.out)
    multiprocessing.spawn(work, (free_port(), arguments, str(out)), nprocs=STAGES)
    return read_raw(out)


def open_raw(name: str, folder: Path) -> Path:
    """A file for raw data that has its first line: the machine and the command."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{name}-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl"
    out.write_text(json.dumps({"machine": describe_machine(), "command": command_line(name)}) + "\n")
    return out


def read_raw(out: Path) -> list[dict[str, Any]]:
    """Its rows, and say where it lies."""
    print(f"\nraw data: {out}")
    return [json.loads(line) for line in out.read_text().splitlines()[1:]]


def main() -> None:
    """Run the benchmark, or print the summary of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=128, help="microbatches per arm and round")
    parser.add_argument("--slice", type=int, default=64, help="microbatches that an arm runs at a time")
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(MICROBATCH_COUNTS), help="values of m")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--short", action="store_true", help="3 rounds of 32 microbatches at m = 2 and 8")
    parser.add_argument("--summary", type=Path, help="print the summary of this raw file instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if arguments.summary:
        lines = [json.loads(line) for line in arguments.summary.read_text().splitlines()]
        print_summary([line for line in lines if "seconds" in line])
        return
    if arguments.short:
        arguments.rounds, arguments.count, arguments.microbatches = 3, 32, [2, 8]
    print_summary(collect("throughput", measure, arguments))


if __name__ == "__main__":
    main()
