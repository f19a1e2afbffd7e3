"""Refuses what does not go with tensor parallelism yet, by name and with what to use instead."""

from __future__ import annotations

from penstock.errors import CapabilityError
from penstock.options.all_options import PipelineOptions
from penstock.schedule.ir.schedule import Op, Schedule
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES


def check_tensor_parallel(schedule: Schedule, options: PipelineOptions, *, adapts: bool) -> None:
    """Make sure that the stages of a schedule can be shared by several processes each.

    Args:
        schedule: as it is to run.
        options: of the pipeline.
        adapts: the microbatches in flight are found while it runs.

    Raises:
        CapabilityError: the runtime does not offer it.
    """
    size = options.partition.tensor_parallel
    if size == 1:
        return
    fault = _of_schedule(schedule) or _of_options(options, adapts)
    if fault is not None:
        raise CapabilityError(f"{schedule.name}: tensor_parallel={size} is not offered {fault}")


def _of_schedule(schedule: Schedule) -> str | None:
    """Say what of a schedule does not go with it; None if all does."""
    ops, rule = schedule.operations, RULES[schedule.rule]
    if Op.W in ops or Op.I in ops:
        return (
            "with backwards in two halves (zero-bubble orders), as sums over the processes of a stage belong to both; "
            "take an order with whole backwards, such as 1f1b or interleaved"
        )
    if rule.rebinds or rule.copies_forward or rule.keeps_forward or rule.provisional:
        return (
            f"with version rule {schedule.rule}, whose passes read other weights than those of their forward, or some "
            "that may be taken back; take a method that flushes, 2bw, stash or vertical-sync"
        )
    if ops & {Op.OFFLOAD, Op.HOLD}:
        return "where activations are moved away; leave offload out, and take another order than bpipe"
    if schedule.sharding.level is not Level.NONE:
        return f"with sharding {schedule.sharding.level} yet; leave one of them out"
    if schedule.slices > 1:
        return "with slices of sequences yet; take a method with whole sequences"
    return None


def _of_options(options: PipelineOptions, adapts: bool) -> str | None:
    """Say what of the options does not go with it; None if all does."""
    parallel, device = options.data_parallel, options.run.device
    if parallel.combine.apart:
        return f"with pipelines that have weights of their own (combine={parallel.combine.kind}); leave combine out"
    if parallel.fast:
        return "with reduce='fast'; add gradients in order"
    if options.staleness.correction is not None or options.staleness.chosen:
        return "with corrections of staleness or chosen delays; leave them out"
    if adapts:
        return "with in_flight='auto', as its processes measure other times; give a number"
    if options.run.compile:
        return "with compiled blocks yet; leave compile out"
    if device is not None and str(device).startswith("cuda"):
        return "on GPUs yet; set device to cpu"
    return None
