"""Refuses what does not go with sharded state, or not yet, by name and with what to use instead."""

from __future__ import annotations

from penstock.errors import CapabilityError, ConfigError
from penstock.options.all_options import PipelineOptions
from penstock.schedule.ir.schedule import Op, Schedule
from penstock.schedule.ir.sharding import Level, Sharding
from penstock.schedule.ir.version_rules import RULES, Update
from penstock.schedule.methods.table import METHODS
from penstock.schedule.proof.unsharded_peaks import sums_wait
from penstock.schedule.transforms.sharding import sharding_fault

_SETTLED = 4  # batches after which a period has all that it ever has


def check_width(plain: Schedule, sharding: Sharding, width: int) -> None:
    """Make sure that there are several to divide the state of stages among, before it is divided.

    Raises:
        ConfigError: there is one.
    """
    level = max(sharding.level, plain.sharding.level, key=list(Level).index)
    if level is Level.NONE or width * plain.directions > 1:
        return
    fault = sharding_fault(plain.rule, level)
    raise ConfigError(
        f"{plain.name}: sharding {level} divides state among parallel pipelines, but there is one; set data_parallel "
        f"(penstock train: width) to 2 or more{'' if fault is None else f'. Besides, {fault}'}"
    )


def check_sharding(schedule: Schedule, options: PipelineOptions) -> None:
    """Make sure that the state of stages can be divided among parallel pipelines.

    Args:
        schedule: as it is to run.
        options: of the pipeline.

    Raises:
        ConfigError: the method does not go with it, or another option speaks against it.
        CapabilityError: the runtime does not offer it.
    """
    level, parallel = schedule.sharding.level, options.data_parallel
    if level is Level.NONE:
        return
    method = METHODS.get(schedule.name)
    fault = sharding_fault(schedule.rule, level, in_turns=method is not None and method.in_turns)
    if fault is not None:  # an own order, or a schedule from a file, has been looked at itself
        raise ConfigError(f"{schedule.name}: {fault}")
    who = f"{schedule.name}: sharding {level}"
    if parallel.combine.apart:
        raise ConfigError(
            f"{who} divides one state among pipelines, which with combine={parallel.combine.kind} have states of their "
            "own; leave one of them out"
        )
    if parallel.fast and level.splits_gradients:
        raise ConfigError(f"{who} adds gradients in the order of the pipelines; set reduce to ordered")
    missing = _missing(schedule, level, options)
    if missing is not None:
        raise CapabilityError(f"{who} is not offered {missing}")


def check_shown(schedule: Schedule, options: PipelineOptions) -> None:
    """Make sure that functions given to `on_update` can be shown whole weights.

    Raises:
        CapabilityError: no pipeline has them after an update.
    """
    level = schedule.sharding.level
    ahead = options.staleness.spec.reads_ahead
    ahead |= level is Level.FULL and RULES[schedule.rule].update is Update.ROTATE  # of the version that is whole
    if level is not Level.NONE and (options.precision.low is not None or ahead):
        raise CapabilityError(
            "on_update: with sharding in low precision, or where passes read other weights than the newest, no "
            "pipeline has the weights in float32 after an update, but its rows of them; set sharding to none, or read "
            "the weights between two runs"
        )


def _missing(schedule: Schedule, level: Level, options: PipelineOptions) -> str | None:
    """Say with what the runtime does not offer the sharding of a schedule yet; None if it does."""
    correction = options.staleness.correction
    if correction is not None and (level is Level.FULL or sharding_fault(schedule.rule, level, correction.name)):
        return (
            f"with correction {correction.name!r} yet, which is not known to work on a shard of a stage alone; take "
            "2bw or a method that flushes, or sharding none"
        )
    if options.staleness.chosen:
        return "with chosen delays yet; take 2bw or a method that flushes, or sharding none"
    if schedule.directions > 1 and level is Level.FULL:
        return "where a pipeline holds stages twice yet; take sharding gradients, or 1f1b or interleaved"
    places = [(stage.index, stage.rank) for stage in schedule.stages]
    if len(set(places)) < len(places):
        return "where a rank holds a stage twice; take another order, such as chimera, or sharding none"
    low = options.precision.low is not None
    if level is Level.GRADIENTS and any(
        sums_wait(schedule, rank, low) and _sums_overtake(schedule, rank) for rank in range(schedule.ranks)
    ):
        return (
            "in 16 bits where a stage adds up the gradients of the next batch before its update; take sharding full or "
            "optimizer, or 2bw"
        )
    return None


def _sums_overtake(schedule: Schedule, rank: int) -> bool:
    """Return whether a stage adds up the gradients of a batch before the update of the batch before."""
    updated = dict.fromkeys(schedule.on_rank(rank), -1)
    for batch in range(_SETTLED):
        for action in schedule.program(rank).period:
            number = batch + action.unit.first
            if action.op is Op.STEP and number >= 0:
                updated[action.stage] = number
            elif action.op is Op.REDUCE and number > updated[action.stage] + 1:
                return True
    return False
