"""Describes the machine of a measurement, and connects the processes that make it."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import socket
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

import penstock


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, versions, and the commit of the Penstock that is measured."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def command_line(name: str) -> str:
    """Return the command of a benchmark for the raw data, without the user's folders."""
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--out")
    _, others = folder.parse_known_args()
    return shlex.join(["python", "-m", f"benchmarks.{name}", *others])


def core_seconds() -> dict[str, float]:
    """Return seconds that the cores of this machine have been busy, of it in interrupts, and idle; on Linux.

    "stolen" is what the host of this machine has withheld.
    """
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    counts = Path("/proc/stat").read_text().split()[1 : len(names) + 1]
    ticks = dict(zip(names, map(int, counts), strict=True))
    idle, stolen = ticks["idle"] + ticks["iowait"], ticks["steal"]
    found = {"busy": sum(ticks.values()) - idle - stolen, "idle": idle, "stolen": stolen}
    found["interrupts"] = ticks["irq"] + ticks["softirq"]
    return {name: count / os.sysconf("SC_CLK_TCK") for name, count in found.items()}


def free_port() -> int:
    """Return an unused port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, port: int, ranks: int, address: str = "127.0.0.1", backend: str = "gloo") -> None:
    """Join the process group as a rank with one thread."""
    torch.set_num_threads(1)
    penstock.keep_freed_memory()
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=ranks)


def leave() -> None:
    """Leave the process group together, so that no rank waits for one that has exited."""
    dist.barrier()
    dist.destroy_process_group()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    folder = Path(penstock.__file__).parent  # not of the benchmarks, which may measure another checkout
    try:
        name = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")
