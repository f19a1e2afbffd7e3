"""Makes sure that all processes build the same pipeline."""

from __future__ import annotations

import zlib

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.errors import ConfigError
from penstock.runtime.plan.plan import PipelinePlan


def check_same_plan(plan: PipelinePlan, grid: RankGrid) -> None:
    """Make sure that all processes build the same pipeline; all call this together.

    Raises:
        ConfigError: their methods, microbatches or blocks differ.
        TransportError: a peer is dead.
    """
    if grid.group is None:
        return
    schedule = plan.schedule
    mine = (
        f"{schedule.name} ({schedule.rule}), {schedule.num_stages} stages, {schedule.microbatches} microbatches, "
        f"{sum(map(len, plan.parts))} blocks"
    )
    details = zlib.crc32(f"{schedule}\n{plan.parts}".encode())
    found = gather_json([mine, details], "comparing pipelines", grid.control)
    for rank, (other, others) in enumerate(found):
        if other != mine:
            raise ConfigError(f"ranks build different pipelines: this one {mine}; rank {rank} {other}")
        if others != details:
            raise ConfigError(
                f"ranks build different pipelines: this one and rank {rank} have {mine}, but not the same order of "
                "passes, names of blocks or blocks of each stage"
            )
