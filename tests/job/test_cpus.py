"""How many threads a process gets: affinity, quotas of control groups, and the processes beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.job.cpus import Cpus, shares

FILES = {
    "one group": ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2.5),
    "the group around it": (
        {
            "proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "sys/fs/cgroup/a/cpu.max": "150000 100000",
        },
        1.5,
    ),
    "in a container": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
    "version 1": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/pod\n0::/", "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
        },
        0.5,
    ),
    "no quota": ({"proc/self/cgroup": "3:cpu:/\n0::/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
    "no groups": ({}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_the_quota_of_control_groups(case: str, tmp_path: Path) -> None:
    files, quota = FILES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    found = Cpus.of_this_process(tmp_path)
    assert found.quota == quota
    assert len(found.affinity) == len(os.sched_getaffinity(0))
    assert Cpus.from_json(found.as_json()) == found


def cpus(*affinity: int, machine: str = "a", container: str = "a", quota: float | None = None) -> Cpus:
    return Cpus(machine, container, affinity, quota)


def test_every_cpu_is_taken_once() -> None:
    """Whether a launcher gives each process its own (srun), or the same to all (torchrun), on one machine or two."""
    assert shares([cpus(*range(8))] * 2) == [4, 4]
    assert shares([cpus(0, 1, 2, 3), cpus(4, 5, 6, 7)]) == [4, 4]
    assert shares([cpus(0, 1, 2, 3), cpus(0, 1, 2, 3), cpus(0, 1, machine="b")]) == [2, 2, 2]
    assert shares([cpus(0, 1)] * 3) == [1, 1, 1]
    assert shares([cpus(0, 1, 2), cpus(2, 3, 4)]) == [2, 2]  # 2.5 each
    assert cpus(*range(9)).threads(3) == 3


def test_a_quota_is_shared_in_its_container_only() -> None:
    everywhere = range(64)
    pods = [cpus(*everywhere, container=name, quota=4.0) for name in ("a 1", "a 1", "a 2")]
    assert shares(pods) == [2, 2, 4]
    assert cpus(*everywhere, quota=0.5).threads() == 1
