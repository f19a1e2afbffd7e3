"""What all processes begin with alike: the plan, and the weights that several of them hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.rank_grid import Holder, RankGrid
from penstock.comm.core.tagged_group import Tag
from penstock.errors import ConfigError
from penstock.partition.tied import Tie
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.rank.batch_source import checksum
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.combine import Combine
from penstock.stage.stage_runtime import StageRuntime
from penstock.stage.stage_weights import TrainedWeights


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


def equalise(ties: Sequence[Tie], schedule: Schedule, grid: RankGrid, ranks: Sequence[RankState]) -> None:
    """Give all copies of tied parameters the values that the first stage has; all processes call this together.

    Raises:
        ConfigError: their shapes differ, or a stage does not train one of them.
        TransportError: a peer is dead.
    """
    for tie in ties:
        here = {Holder(w.key.pipeline, n): w.stages[n] for w in ranks for n in w.stages if n.index in tie.stages}
        found: list[tuple[int, Any]] = [
            (h.stage.index, _shapes(tie, h.stage.index, stage)) for h, stage in here.items()
        ]
        if grid.group is not None:
            parts = gather_json(found, "comparing shared parameters", grid.control)
            found = [(index, shapes) for part in parts for index, shapes in part]
        for index, shapes in found:
            if isinstance(shapes, str):
                raise ConfigError(shapes)
            if shapes != found[0][1]:
                raise ConfigError(
                    f"{', '.join(tie.names_at(index))} of stage {index} have shapes {shapes}, of stage {found[0][0]} "
                    f"{found[0][1]}; what is one parameter has one shape"
                )
        first, *others = tie.stages
        for pipeline, place, index in product(grid.pipelines, range(schedule.directions), others):
            if (first, place) not in schedule.stage_at:
                continue
            source, target = (Holder(pipeline, schedule.stage_at[c, place]) for c in (first, index))
            _copy(tie, source, target, here, grid)
            other = here.get(target)
            if other is not None and isinstance(other.weights, TrainedWeights):
                other.weights.store.refresh()


def follow_first(ranks: Sequence[RankState]) -> None:
    """Copy the newest weights of the first copy of a stage in this process to the others, if users changed them."""
    for weights, first in _copies(ranks):
        for mine, wanted in zip(weights.store.master.flats, first.store.master.flats, strict=True):
            if not torch.equal(mine, wanted):
                weights.store.master.rewrite()
                mine.copy_(wanted)


def follow_settings(ranks: Sequence[RankState]) -> None:
    """Set for the optimizers of the other copies of a stage in this process what users have set for the first one.

    Raises:
        ConfigError: a scheduler sets it.
    """
    for weights, first in _copies(ranks):
        first.updater.take_over()
        weights.updater.follow_settings(first.updater)


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
    mine = [(n.index, checksum(sorted(r.module.state().items()), None)) for w in ranks for n, r in w.stages.items()]
    found = gather_json(mine, "comparing parallel pipelines", grid.control)
    first: dict[int, tuple[int, int]] = {}
    for rank, part in enumerate(found):
        for index, value in part:
            other, wanted = first.setdefault(index, (rank, value))
            if value != wanted:
                raise ConfigError(
                    f"stage {index} does not begin with the same weights on ranks {other} and {rank}; seed torch alike "
                    "on all ranks before the blocks are made, or let them be made lazily"
                )


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


def _shapes(tie: Tie, index: int, stage: StageRuntime) -> list[list[int]] | str:
    """Return the shapes of tied parameters on a stage, or the error message there, which all ranks are to raise."""
    try:
        return [list(view.shape) for view in _values(tie, index, stage)]
    except ConfigError as error:
        return str(error)


def _values(tie: Tie, index: int, stage: StageRuntime) -> list[Tensor]:
    """Return the present values of tied parameters on a stage.

    Raises:
        ConfigError: the stage does not train one of them.
    """
    names, trained = tie.names_at(index), stage.module.trained
    missing = [name for name in names if name not in trained]
    if missing or not isinstance(stage.weights, TrainedWeights):
        raise ConfigError(f"tied: {stage.module.where} trains no parameter {missing[0] if missing else names[0]!r}")
    views = stage.weights.store.master.views
    return [views[name] for name in names]


def _copy(tie: Tie, source: Holder, target: Holder, here: Mapping[Holder, StageRuntime], grid: RankGrid) -> None:
    """Copy tied parameters from the first stage to another one, within this process or between two."""
    owner, other = here.get(source), here.get(target)
    first, index = source.stage.index, target.stage.index
    with torch.no_grad():
        if owner is not None and other is not None:
            for mine, theirs in zip(_values(tie, first, owner), _values(tie, index, other), strict=True):
                theirs.copy_(mine)
        elif owner is not None:
            for mine in _values(tie, first, owner):
                dist.send(mine.cpu(), group=grid.control, tag=Tag.INITIAL_WEIGHTS, group_dst=grid.process(target))
        elif other is not None:
            for theirs in _values(tie, index, other):
                received = torch.empty(theirs.shape, dtype=theirs.dtype)
                dist.recv(received, group=grid.control, tag=Tag.INITIAL_WEIGHTS, group_src=grid.process(source))
                theirs.copy_(received)
