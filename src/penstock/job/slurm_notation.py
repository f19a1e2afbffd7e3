"""Parses what Slurm says about a step, in its own notations."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.errors import ConfigError

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def first_host(hosts: str) -> str:
    """Return the first host of a list such as `node[03-10,12],gpu7`.

    Raises:
        ConfigError: it is no such list.
    """
    first = re.match(r"[^,\[\]]*(\[[^\]]*\][^,\[\]]*)*", hosts)
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"cannot read the list of nodes that Slurm gives, {hosts!r}; set MASTER_ADDR")
    return name


def tasks_on_node(environment: Mapping[str, str]) -> int | None:
    """Return how many tasks of the step run on this node; None if Slurm does not say so.

    Slurm writes `2(x3),1` for two tasks on each of three nodes and one on the fourth.
    """
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    counts = [int(count) for count, times in _TASKS.findall(text) for _ in range(min(int(times or 1), 1 << 20))]
    node = environment.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def step_of(environment: Mapping[str, str]) -> str:
    """Return the name of the step, which no other one of the cluster has at the same time."""
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    return f"{environment.get('SLURM_JOB_ID') or environment.get('SLURM_JOBID') or ''}.{step}"
