"""Measures net resident memory per rank of Penstock and torch.distributed.pipelining, m = 8.

    python -m benchmarks.memory

Every measurement uses a fresh pair of processes. Net memory is the highest resident size while training, minus the
resident size before the model was made (interpreter, libraries, data). Medians over interleaved repetitions; raw data
go to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch.distributed as dist
from torch import multiprocessing

from benchmarks.arms import ARMS, STAGES, Data
from benchmarks.machine import command_line, describe_machine, free_port, join, leave

RESULTS = Path(__file__).parent / "results"
MICROBATCHES = 8


def measure(rank: int, port: int, name: str, batches: int, queue: multiprocessing.SimpleQueue) -> None:
    """Measure one arm on one rank; put (rank, net bytes) into the queue."""
    join(rank, port, STAGES)
    data = Data()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the highest resident size
    before = _status("VmRSS")
    arm = ARMS[name](MICROBATCHES, data)
    arm.run(1)
    arm.run(batches)
    arm.close()
    queue.put((rank, _status("VmHWM") - before))
    leave()


def _status(field: str) -> int:
    """Read a memory figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def run_arm(name: str, batches: int) -> list[int]:
    """Return the net bytes of both ranks."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    multiprocessing.spawn(measure, (free_port(), name, batches, queue), nprocs=STAGES)
    found = dict(queue.get() for _ in range(STAGES))
    return [found[rank] for rank in range(STAGES)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--arms", nargs="+", default=[name for name in ARMS if name != "ceiling"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out / f"memory-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl"
    header = {"machine": describe_machine(), "command": command_line("memory")}
    out.write_text(json.dumps(header) + "\n")
    found: dict[str, list[list[int]]] = {name: [] for name in arguments.arms}
    for round_ in range(arguments.rounds):
        for name in arguments.arms:
            net = run_arm(name, arguments.batches)
            found[name].append(net)
            with out.open("a") as file:
                file.write(json.dumps({"round": round_, "arm": name, "net_bytes": net}) + "\n")
    print("| arm | " + " | ".join(f"rank {rank}, MB" for rank in range(STAGES)) + " |")
    print("|---" * (STAGES + 1) + "|")
    for name, rounds in found.items():
        medians = [statistics.median(net[rank] for net in rounds) / 1e6 for rank in range(STAGES)]
        print(f"| {name} | " + " | ".join(f"{m:.1f}" for m in medians) + " |")
    print(f"\nraw data: {out}")


if __name__ == "__main__":
    main()
