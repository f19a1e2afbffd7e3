"""Makes sure that all processes build the same pipeline."""

from __future__ import annotations

import zlib

import torch.distributed as dist

from penstock.comm.collective.gather import gather_json
from penstock.errors import ConfigError
from penstock.runtime.plan.plan import UnprovenPlan


def check_same_plan(plan: UnprovenPlan, control: dist.ProcessGroup) -> None:
    """Make sure that all processes build the same pipeline; all call this together.

    Args:
        plan: of this one.
        control: a process group on the CPU.

    Raises:
        ConfigError: their methods, microbatches or blocks differ.
        TransportError: a peer is dead.
    """
    schedule = plan.schedule
    mine = (
        f"{schedule.name} ({schedule.rule}), {schedule.num_stages} stages, {schedule.microbatches} microbatches, "
        f"{sum(map(len, plan.parts))} blocks"
    )
    details = zlib.crc32(f"{schedule}\n{plan.parts}".encode())
    found = gather_json([mine, details], "comparing pipelines", control)
    for rank, (other, others) in enumerate(found):
        if other != mine:
            raise ConfigError(f"ranks build different pipelines: this one {mine}; rank {rank} {other}")
        if others != details:
            raise ConfigError(
                f"ranks build different pipelines: this one and rank {rank} have {mine}, but not the same order of "
                "passes, names of blocks or blocks of each stage"
            )
