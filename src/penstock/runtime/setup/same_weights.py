"""Checks before training that all processes build the same pipeline, and that copies of a stage begin equal."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from zlib import crc32

import torch
import torch.distributed as dist

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.data.checksum import checksum
from penstock.runtime.plan.options_equal_on_ranks import differing_options
from penstock.runtime.plan.plan import UnprovenPlan
from penstock.runtime.plan.received_schedule import OtherScheduleError
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.stage.sharded_stage_weights import ShardedWeights
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.stage.untrained_stage_weights import StageWeights


def follow_first(ranks: Sequence[RankState]) -> None:
    """Copy the newest weights of the first copy of a stage in this process to the others, if users changed them."""
    for weights, first in _copies(ranks):
        for mine, wanted in zip(weights.store.master.flats, first.store.master.flats, strict=True):
            if not torch.equal(mine, wanted):
                weights.store.master.rewrite()
                mine.copy_(wanted)


def follow_hooks(ranks: Sequence[RankState]) -> None:
    """Take the hooks that parameters of every stage have; other copies in this process have those of the first."""
    for state in ranks:
        for stage in state.stages.values():
            stage.weights.take_hooks(stage.module.tensors.trained)
    for weights, first in _copies(ranks):
        weights.store.hooks = first.store.hooks


def follow_settings(ranks: Sequence[RankState]) -> None:
    """Set for the optimizers of the other copies of a stage in this process what users have set for the first one.

    Raises:
        ConfigError: a scheduler sets it.
    """
    for weights, first in _copies(ranks):
        first.updater.rates.take_over(first.updater.updates)
        weights.updater.rates.follow(first.updater.rates)


def _copies(ranks: Sequence[RankState]) -> Iterator[tuple[TrainedWeights, TrainedWeights]]:
    """Yield the weights of every further copy of a stage in this process, with those of the first copy."""
    stages = [(stage.index, r) for w in ranks for stage, r in w.stages.items()]
    trained = [(i, r.place, r.weights) for i, r in stages if isinstance(r.weights, TrainedWeights)]
    first = {index: weights for index, place, weights in trained if place == 0}
    yield from ((weights, first[index]) for index, place, weights in trained if place and index in first)


def check_equal(schedule: Schedule, grid: RankGrid, ranks: Sequence[RankState]) -> None:
    """Make sure that copies of a stage in different processes begin with the same weights and buffers.

    Raises:
        ConfigError: they differ.
        TransportError: a peer is dead.
    """
    if grid.width * schedule.directions == 1 or grid.group is None:
        return
    mine = [
        (n.index, checksum(sorted(r.module.tensors.state().items()), None), _division(r.weights))
        for w in ranks
        for n, r in w.stages.items()
    ]
    found = gather_json(mine, "comparing parallel pipelines", grid.control)
    first: dict[int, tuple[int, int, int]] = {}
    for rank, part in enumerate(found):
        for index, value, division in part:
            other, wanted, divided = first.setdefault(index, (rank, value, division))
            if division != divided:
                raise ConfigError(
                    f"ranks {other} and {rank} divide the rows of stage {index} differently among pipelines; do all "
                    "run the same version of penstock?"
                )
            if value != wanted:
                raise ConfigError(
                    f"stage {index} does not begin with the same weights on ranks {other} and {rank}: call "
                    "torch.manual_seed with one number on all ranks before the model is made, or load the same weights "
                    "on all of them"
                )


def _division(weights: StageWeights) -> int:
    """Return a checksum of who owns which rows of a stage; 0 where nothing is divided."""
    return crc32(repr(weights.store.shards.table).encode()) if isinstance(weights, ShardedWeights) else 0


def check_written(combine: Combine, grid: RankGrid, ranks: Sequence[RankState]) -> None:
    """Make sure that weights written between two runs are the same in all pipelines, if these begin anew from them.

    This concerns pipelines with weights of their own (`combine`); others keep theirs equal anyway.

    Raises:
        ConfigError: they differ, so the pipelines would have nothing in common.
        TransportError: a peer is dead.
    """
    if not combine.apart:
        return
    agreements = [(stage.index, r.weights.agreement) for w in ranks for stage, r in w.stages.items()]
    watches = [(index, agreement.watch) for index, agreement in agreements if agreement is not None]
    found = [[index, watch.taken_over, watch.seen] for index, watch in watches]
    for _, watch in watches:
        watch.taken_over = False
    parts = [found] if grid.group is None else gather_json(found, "comparing parallel pipelines", grid.control)
    everywhere = [tuple(one) for part in parts for one in part]
    for index in sorted({index for index, taken_over, _ in everywhere if taken_over}):
        if len({seen for other, _, seen in everywhere if other == index}) > 1:
            raise ConfigError(
                f"weights of stage {index} were written into between two runs, but not the same into those of all "
                f"{grid.width} pipelines, which have weights of their own with combine.kind={combine.kind}: write the "
                "same on all ranks, or load a checkpoint (Pipeline.load), or make a new Pipeline of these weights"
            )


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
