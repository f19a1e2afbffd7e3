"""How many CPUs this process may use: its affinity, the quota of its control group, and the processes beside it."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cpus:
    """The CPUs of one process.

    Attributes:
        machine: tells machines apart; containers on one machine have the same.
        container: tells the containers of all machines apart.
        affinity: the numbers of the CPUs that it may run on.
        quota: of CPU time per time, that all processes of the container share; None if there is none.
    """

    machine: str
    container: str
    affinity: tuple[int, ...]
    quota: float | None

    @classmethod
    def of_this_process(cls, root: Path = Path("/")) -> Cpus:
        """Read them from the system; `root` is where its files are."""
        if hasattr(os, "sched_getaffinity"):
            affinity = tuple(sorted(os.sched_getaffinity(0)))
        else:
            affinity = tuple(range(os.cpu_count() or 1))
        host = socket.gethostname()
        machine = _text(root / "proc/sys/kernel/random/boot_id") or host
        return cls(machine, f"{machine} {host}", affinity, _quota(root))

    def as_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` makes it again."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Cpus:
        """Make it from the values of `as_json`."""
        return cls(**{**values, "affinity": tuple(values["affinity"])})

    def threads(self, processes: int = 1) -> int:
        """Return how many threads each of so many processes with these CPUs should have, at least 1."""
        return shares([self] * processes)[0]


def shares(all_cpus: Sequence[Cpus]) -> list[int]:
    """Return how many threads each process of a job should have, at least 1, so that they share the CPUs."""
    return [max(int(part + 1e-6), 1) for part in parts(all_cpus)]


def parts(all_cpus: Sequence[Cpus]) -> list[float]:
    """Return how many CPUs each process of a job has, where together they take every CPU once.

    A launcher may give each process CPUs of its own, as srun does, or all processes of a machine the same ones. So
    every CPU is divided between the processes that may run on it.
    """
    taken = Counter((cpus.machine, number) for cpus in all_cpus for number in cpus.affinity)
    beside = Counter(cpus.container for cpus in all_cpus)
    return [
        min(
            sum(1 / taken[cpus.machine, number] for number in cpus.affinity),
            math.inf if cpus.quota is None else cpus.quota / beside[cpus.container],
        )
        for cpus in all_cpus
    ]


def _quota(root: Path) -> float | None:
    """Return the CPU quota of this process's control group and of those around it, in CPUs."""
    found: list[float] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, place = line.split(":", 2)
        folders = [*Path(place.lstrip("/")).parents, Path(place.lstrip("/"))]
        if number == "0":
            found += _limits(_text(root / "sys/fs/cgroup" / folder / "cpu.max").split() for folder in folders)
        elif "cpu" in controllers.split(","):
            places = [root / "sys/fs/cgroup" / controllers / folder for folder in folders]
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            found += _limits([_text(path / name) for name in names] for path in places)
    return min(found, default=None)


def _limits(pairs: Iterable[Sequence[str]]) -> Iterable[float]:
    """Yield the quotas among pairs of CPU time and period, which are `max` or negative where there is none."""
    for pair in pairs:
        if len(pair) == 2 and all(text.isdigit() and int(text) for text in pair):
            yield int(pair[0]) / int(pair[1])


def _text(path: Path) -> str:
    """Return what is in a file; nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
