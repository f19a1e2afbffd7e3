"""Chooses how the ranks of a pipeline wait: by looking, or asleep where they share cores."""

from __future__ import annotations

import os
import platform
from typing import Literal

import torch.distributed as dist

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.ticket import LATENCY, SHARED, Polling

Waits = Literal["auto", "latency", "shared"]


def choose_polling(waits: Waits, group: dist.ProcessGroup | None) -> Polling:
    """Return how this process waits; a collective call of the group.

    Args:
        waits: "latency" to look, "shared" to sleep, "auto" to sleep where the processes of a machine outnumber the
            cores that they may use.
        group: of all ranks; in one process, ranks do not wait.

    Raises:
        TransportError: a peer is dead.
    """
    if group is None:
        return LATENCY
    here = (platform.node(), _cores())
    machines = gather_json(here, "counting the processes of each machine", group)
    crowded = sum(name == here[0] for name, _ in machines) > here[1]
    return SHARED if waits == "shared" or (waits == "auto" and crowded) else LATENCY


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
