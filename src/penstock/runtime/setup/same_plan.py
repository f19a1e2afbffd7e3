"""Makes sure that all processes build the same pipeline."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch.distributed as dist

from penstock.comm.collective.gather import gather_json
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.plan.known_schedule import OtherScheduleError
from penstock.runtime.plan.plan import UnprovenPlan


def check_same_plans(
    plans: Mapping[str, UnprovenPlan], failure: PenstockError | None, control: dist.ProcessGroup
) -> None:
    """Make sure that all processes build the same pipelines; all call this together.

    Args:
        plans: of this one, by name.
        failure: why this one could not make them; then there are none.
        control: a process group on the CPU.

    Raises:
        ConfigError: their methods, microbatches, blocks or options differ; or another one could not make them.
        PenstockError: `failure`.
        TransportError: a peer is dead.
    """
    mine = "; then ".join(plan.description for plan in plans.values())
    if isinstance(failure, OtherScheduleError):
        mine, failure = str(failure), None
    details = zlib.crc32("\n".join(f"{name}\n{plan.identity}" for name, plan in plans.items()).encode())
    found = gather_json([mine, details, failure and str(failure)], "comparing pipelines", control)
    if failure is not None:
        raise failure
    for rank, (other, others, failed) in enumerate(found):
        if failed is not None:
            raise ConfigError(f"rank {rank} cannot build the pipeline that this one does, {mine}: {failed}")
        if other != mine:
            raise ConfigError(f"ranks build different pipelines: this one {mine}; rank {rank} {other}")
        if others != details:
            raise ConfigError(
                f"ranks build different pipelines: this one and rank {rank} have {mine}, but not the same order of "
                "passes, options, names of blocks or blocks of each stage"
            )
