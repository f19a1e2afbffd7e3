"""Chooses how the ranks of a pipeline wait: by looking, or asleep where they share cores."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from penstock.comm.collective.all_gather_json import gather_json
from penstock.comm.core.ticket import LATENCY, SHARED, Polling
from penstock.job.cpus import Cpus, parts

Waits = Literal["auto", "latency", "shared"]


def cores_of_this_rank(group: dist.ProcessGroup | None) -> float | None:
    """Return how many CPUs this process has, by affinity and quota, where all take every CPU once; a collective call.

    Args:
        group: of all ranks; in one process, which has what there is, None is returned.

    Raises:
        TransportError: a peer is dead.
    """
    if group is None:
        return None
    everywhere = gather_json(Cpus.of_this_process().as_json(), "sharing the CPUs", group)
    return parts([Cpus.from_json(cpus) for cpus in everywhere])[dist.get_rank(group)]


def choose_polling(waits: Waits, cores: float | None) -> Polling:
    """Return how this process waits.

    Args:
        waits: "latency" to look, "shared" to sleep, "auto" to sleep where this process has less than a CPU of its own.
        cores: that it has; None in one process, where ranks do not wait.
    """
    if cores is None:
        return LATENCY
    crowded = cores < 1 - 1e-6
    return SHARED if waits == "shared" or (waits == "auto" and crowded) else LATENCY
