"""Makes sure that all processes build the same pipeline."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch.distributed as dist

from penstock.comm.collective.control_plane import gather_json
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.plan.options_equal_on_ranks import differing_options
from penstock.runtime.plan.plan import UnprovenPlan
from penstock.runtime.plan.received_schedule import OtherScheduleError


def check_same_plans(plans: Mapping[str, UnprovenPlan], failure: Exception | None, control: dist.ProcessGroup) -> None:
    """Make sure that all processes build the same pipelines; all call this together.

    Args:
        plans: of this one, by name.
        failure: why this one could not make them; then there are none.
        control: a process group on the CPU.

    Raises:
        ConfigError: their methods, microbatches, blocks or options differ; or another one could not make them.
        Exception: `failure`.
        TransportError: a peer is dead.
    """
    mine = "; then ".join(plan.description for plan in plans.values())
    if isinstance(failure, OtherScheduleError):
        mine, failure = str(failure), None
    options, details = dict[str, dict[str, str]](), 0
    try:
        options = {name: plan.common_options for name, plan in plans.items()}
        details = zlib.crc32("\n".join(f"{name}\n{plan.identity}" for name, plan in plans.items()).encode())
    except Exception as error:  # such as of a sharding that does not go with that of the schedule
        failure = failure or error
    found = gather_json([mine, options, details, _said(failure)], "comparing pipelines", control)
    if failure is not None:
        raise failure
    for rank, (other, other_options, others, failed) in enumerate(found):
        if failed is not None:
            raise ConfigError(f"rank {rank} cannot build the pipeline that this one does, {mine}: {failed}")
        if other != mine:
            raise ConfigError(f"ranks build different pipelines: this one {mine}; rank {rank} {other}")
        here, there = differing_options(options, other_options)
        if here:
            raise ConfigError(
                f"ranks build different pipelines: this one has {_listed(here)}, rank {rank} has {_listed(there)}; "
                "give all ranks the same options"
            )
        if others != details:
            raise ConfigError(
                f"ranks build different pipelines: this one and rank {rank} have {mine}, but not the same order of "
                "passes, names of blocks or blocks of each stage"
            )


def _said(failure: Exception | None) -> str | None:
    """What other ranks are told of a failure."""
    if failure is None:
        return None
    return str(failure) if isinstance(failure, PenstockError) else f"{type(failure).__name__}: {failure}"


def _listed(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in options.items())
