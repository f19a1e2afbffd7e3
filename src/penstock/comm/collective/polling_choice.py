"""Chooses how the ranks of a pipeline wait: by looking, or asleep where they share cores."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from penstock.comm.collective.all_gather_json import gather_json
from penstock.comm.core.ticket import LATENCY, SHARED, Polling
from penstock.job.cpus import Cpus, parts

Waits = Literal["auto", "latency", "shared"]


def choose_polling(waits: Waits, group: dist.ProcessGroup | None) -> Polling:
    """Return how this process waits; a collective call of the group.

    Args:
        waits: "latency" to look, "shared" to sleep, "auto" to sleep where this process has less than a CPU of its own,
            by affinity and quota.
        group: of all ranks; in one process, ranks do not wait.

    Raises:
        TransportError: a peer is dead.
    """
    if group is None:
        return LATENCY
    everywhere = gather_json(Cpus.of_this_process().as_json(), "sharing the CPUs", group)
    crowded = parts([Cpus.from_json(cpus) for cpus in everywhere])[dist.get_rank(group)] < 1 - 1e-6
    return SHARED if waits == "shared" or (waits == "auto" and crowded) else LATENCY
