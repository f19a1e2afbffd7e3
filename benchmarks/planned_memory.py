"""Whether the plan for a limit of memory trains under it, and a plan that the planner rejects for it ends.

    python -m benchmarks.planned_memory

A GPT is profiled, block by block, and planned for two processes: without a limit, and for one that this plan exceeds by
5 %. Then both plans are trained, with `penstock train --plan`, under the limit: the kernel allows each process so many
bytes of data (RLIMIT_DATA) on top of what such a run takes with a tiny model. Freed memory is given back
(`keep_freed_memory: false`), and there are no checkpoints, whose copies no plan counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.resident import add_row, status
from benchmarks.throughput import RESULTS, open_raw

OVER = 1.05  # what the plan without a limit takes, in units of the limit
DEVICES, BATCHES = 2, 4
SETTINGS = ("keep_freed_memory=false", "checkpoint.every=null", "validation_samples=8", "sample_length=0")
_LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))  # of each thread; most of it is never used
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
runpy.run_module("penstock", run_name="__main__", alter_sys=True)
"""


def model(layers: int, width: int, context: int) -> list[str]:
    """Return the changes of the configuration that make a model."""
    return [
        f"model.layers={layers}",
        f"model.width={width}",
        f"model.heads={max(2, width // 64)}",
        f"model.context={context}",
    ]


TINY = model(2, 16, 16)


def penstock(*arguments: object, limit: float = 0) -> subprocess.Popen[str]:
    """Start a command; its processes may have so many bytes of data each, if not 0."""
    command = [sys.executable, "-c", _LIMITED, str(int(limit)), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    """Return what a command has printed.

    Raises:
        RuntimeError: it has failed.
    """
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(said)
    return said


def profile(folder: Path, changes: Sequence[str], sizes: str) -> None:
    """Measure the model block by block, for microbatches of some sizes."""
    settings = [part for each in (*changes, f"stages={DEVICES}") for part in ("--set", each)]
    output_of(penstock("profile", *settings, "--microbatch-sizes", sizes, "--out", folder / "profile.yaml"))


def plan(folder: Path, name: str, batch: int, memory: float | None) -> dict[str, Any]:
    """Plan, and write the plan; returns everything that was found."""
    asked = ["plan", "--profile", folder / "profile.yaml", "--devices", DEVICES, "--global-batch", batch]
    asked += ["--cost", "simulated", *([] if memory is None else ["--memory", int(memory)])]
    found = json.loads(output_of(penstock(*asked, "--json", "--out", folder / name)))
    assert isinstance(found, dict)
    return found


def train(folder: Path, chosen: Sequence[object], changes: Sequence[str], limit: float = 0) -> tuple[str, int]:
    """Train; returns how that ended, and the most bytes of data that any of its processes had."""
    always = (*SETTINGS, f"batches={BATCHES}")
    settings = [part for each in (*changes, *always, f"out={folder / 'runs'}") for part in ("--set", each)]
    process, most = penstock("train", *chosen, *settings, limit=limit), 0
    while process.poll() is None:
        most = max([most, *(_data_of(child) for child in _descendants(process.pid))])
        time.sleep(0.02)
    said, _ = process.communicate()
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or line.startswith("raised by")]
    said = f"trained {BATCHES} batches" if process.returncode == 0 else f"ended: {' '.join(told or lines[-1:]):.300}"
    return said, most


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and these again."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *_descendants(child))]


def _data_of(pid: int) -> int:
    """Return the bytes of data of a process, as the kernel limits them; 0 if it has ended."""
    try:
        return status("VmData", pid)
    except (OSError, RuntimeError):
        return 0


def most_memory(planned: dict[str, Any]) -> int:
    """Return the bytes that the best plan takes on its fullest device."""
    return int(max(stage["memory"] for stage in planned["plans"][0]["stages"]))


def measure(folder: Path, changes: Sequence[str], batch: int, sizes: str, out: Path) -> None:
    """Profile, plan with and without a limit, and train both plans under it; prints a table."""
    profile(folder, changes, sizes)
    rejected = plan(folder, "rejected.yaml", batch, None)
    limit = most_memory(rejected) / OVER
    planned = plan(folder, "planned.yaml", batch, limit)
    _, besides = train(folder, ["1f1b", "--stages", DEVICES], TINY)
    print(f"limit {limit / 1e6:.0f} MB; the command with a tiny model takes {besides / 1e6:.0f} MB\n")
    print("| plan | predicted, MB | most data less those of the tiny model, MB | under the limit |\n|---|---|---|---|")
    for title, found, file in (("for the limit", planned, "planned"), ("without a limit", rejected, "rejected")):
        said, most = train(folder, ["--plan", folder / f"{file}.yaml"], changes, limit + besides)
        settings, predicted = found["plans"][0]["settings"], most_memory(found)
        row = {"plan": title, "settings": settings, "predicted": predicted, "limit": limit}
        add_row(out, {**row, "besides": besides, "most_data": most, "said": said})
        short = ", ".join(f"{key}={value}" for key, value in settings.items() if key not in ("balance", "model"))
        cells = title + ": " + short, f"{predicted / 1e6:.0f}", f"{(most - besides) / 1e6:.0f}", said
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--microbatch-sizes", default="1,2,4")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw data")
    arguments = parser.parse_args()
    out = open_raw("planned_memory", arguments.out)
    changes = model(arguments.layers, arguments.width, arguments.context)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), changes, arguments.global_batch, arguments.microbatch_sizes, out)
    print(f"\nraw data: {out}")


if __name__ == "__main__":
    main()
