"""Refuses what does not go with sharded state, or not yet, by name and with what to use instead."""

from __future__ import annotations

from penstock.errors import CapabilityError, ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.sharding import Level


def check_sharding(schedule: Schedule, options: PipelineOptions) -> None:
    """Make sure that the state of stages can be divided among parallel pipelines.

    Args:
        schedule: as it is to run.
        options: of the pipeline.

    Raises:
        ConfigError: there is nobody to divide it among, or another option speaks against it.
        CapabilityError: the runtime does not offer it.
    """
    level, parallel = schedule.sharding.level, options.data_parallel
    if level is Level.NONE:
        return
    who = f"{schedule.name}: sharding {level}"
    if parallel.width == 1:
        raise ConfigError(
            f"{who} divides state among parallel pipelines, but there is one; set data_parallel (penstock train: "
            "width) to 2 or more"
        )
    if parallel.combine.apart:
        raise ConfigError(
            f"{who} divides one state among pipelines, which with combine={parallel.combine.kind} have states of their "
            "own; leave one of them out"
        )
    if parallel.fast and level.splits_gradients:
        raise ConfigError(f"{who} adds gradients in the order of the pipelines; set reduce to ordered")
    missing = _missing(schedule, options)
    if missing is not None:
        raise CapabilityError(f"{who} is not offered {missing}")


def _missing(schedule: Schedule, options: PipelineOptions) -> str | None:
    """Say with what the runtime does not offer the sharding of a schedule yet; None if it does."""
    if options.staleness.correction is not None or options.staleness.chosen:
        return "with corrections of staleness or chosen delays yet; take 2bw or a method that flushes, or sharding none"
    if schedule.directions > 1:
        return "where a pipeline holds stages twice yet; take 1f1b or interleaved, or sharding none"
    return None
