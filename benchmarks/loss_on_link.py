"""Loss against the clock: `penstock train` on two hosts with a slow link between them, one method after the other.

    python -m benchmarks.loss_on_link                             # 1f1b and 2bw-ahead at 100 Mbit/s; needs root
    python -m benchmarks.loss_on_link --link "1 Gbit/s" --batches 400
    python -m benchmarks.loss_on_link --summary FILE

Hosts are those of `benchmarks.links`: network namespaces, one rank of one thread in each. All methods train the same
model (a GPT of the default size) on the same samples, four microbatches per update, with clipped gradients. Held-out
losses are those that the run takes itself, without a drain; the clock is that of its first rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.network.hosts import INTERFACE, LINKS, Link, Network, why_not
from benchmarks.network.team import ROOT
from benchmarks.throughput import RESULTS, open_raw, read_raw

METHODS = ("1f1b", "2bw-ahead")
MICROBATCHES, SAMPLES, EVERY, HELD_OUT = 4, 4, 50, 256
_PORT = 29700


def command(method: str, link: Link, batches: int, seed: int, out: Path) -> list[str]:
    """What each host runs; ranks meet as under any launcher."""
    settings = {
        "batches": batches,
        "microbatch_size": SAMPLES,
        "lr_schedule.warm_up": batches // 4,
        "optimizer.lr": 3e-3,
        "max_grad_norm": 1.0,
        "evaluate.every": EVERY,
        "evaluate.samples": HELD_OUT,
        "validation_samples": HELD_OUT,
        "sample_length": 0,
        "checkpoint.every": "null",
        "seed": seed,
        "threads": 1,
        "out": out,
    } | ({} if link.mbit is None else {"options.in_flight": "auto"})
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [
        *(sys.executable, "-m", "penstock", "train", method, "--stages", "2", "--microbatches", str(MICROBATCHES)),
        *sets,
    ]


def train(network: Network, method: str, link: Link, batches: int, seed: int) -> list[dict[str, float]]:
    """Train on both hosts; return seconds and held-out loss after each number of updates."""
    network.set(link)
    with tempfile.TemporaryDirectory() as folder:
        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": network.address(0)}
        place |= {"MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        hosts = [
            subprocess.Popen(
                network.inside(rank, *command(method, link, batches, seed, Path(folder))),
                env={**os.environ, **place, "RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        ended = [host.wait() for host in hosts]
        if any(ended):
            raise SystemExit(f"{method} ended with {ended}; its message is above")
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        return curve([json.loads(line) for line in metrics.read_text().splitlines()])


def curve(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Held-out losses of a run, the last one at its end, with the seconds at which their updates were made."""
    seconds = {row["batch"] + 1: row["seconds"] for row in rows if "batch" in row}
    found = {row["evaluated"]: row["loss"] for row in rows if "evaluated" in row}
    found |= {max(seconds): row["validation_loss"] for row in rows if "validation_loss" in row}
    return [{"updates": updates, "seconds": seconds[updates], "loss": loss} for updates, loss in found.items()]


def seconds_to(loss: float, points: list[dict[str, float]]) -> float | None:
    """When a curve has first come down to a loss, on the straight line between two evaluations; None if never."""
    for before, after in pairwise(points):
        if after["loss"] <= loss:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"]) if before["loss"] > loss else 0.0
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def print_summary(rows: list[dict[str, Any]]) -> None:
    """What each method has reached when, and when the others have the last loss of the first one."""
    print("| link | seed | method | updates | seconds | last loss | seconds to the last loss of the first |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        first = next(r for r in rows if (r["link"], r["seed"]) == (row["link"], row["seed"]))
        last, when = row["points"][-1], seconds_to(first["points"][-1]["loss"], row["points"])
        print(
            f"| {row['link']} | {row['seed']} | {row['method']} | {last['updates']} | {last['seconds']:.0f} | "
            f"{last['loss']:.4f} | {'-' if when is None else f'{when:.0f}'} |"
        )


def main() -> None:
    """Train all methods for each seed, in turns, or print the summary of a raw file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="the first one is what others must reach")
    parser.add_argument("--link", default="100 Mbit/s", choices=[name for name, link in LINKS.items() if link.mbit])
    parser.add_argument("--batches", type=int, default=1000, help="updates")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--summary", type=Path, help="print the summary of this raw file instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    if arguments.summary:
        print_summary(read_raw(arguments.summary))
        return
    if reason := why_not():
        raise SystemExit(f"skipped: {reason}")
    out = open_raw("loss_on_link", arguments.out)
    rows = []
    with Network(2) as network, out.open("a") as file:
        for seed in arguments.seeds:
            for method in arguments.methods:
                points = train(network, method, LINKS[arguments.link], arguments.batches, seed)
                rows.append({"link": arguments.link, "seed": seed, "method": method, "points": points})
                print(json.dumps(rows[-1]), file=file, flush=True)
    print_summary(rows)


if __name__ == "__main__":
    main()
