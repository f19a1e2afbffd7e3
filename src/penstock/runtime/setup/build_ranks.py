"""Build the ranks of this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from penstock.comm.collective.clock_sync import common_origin
from penstock.comm.core.rank_grid import RankGrid
from penstock.comm.core.trace_recorder import Recorder
from penstock.partition.blocks import deal
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.setup.same_weights import check_equal
from penstock.runtime.setup.tensor_division import check_division
from penstock.runtime.setup.tied_weights_broadcast import equalise
from penstock.runtime.update.stop_request import StopRequest
from penstock.stage.blocks.loss import LossFunction
from penstock.weights.optim.optimizer_factory import OptimizerFactory


def make_ranks(
    named: Mapping[str, Any],
    plan: PipelinePlan,
    grid: RankGrid,
    loss: LossFunction | Mapping[int, LossFunction],
    optimizer: OptimizerFactory,
) -> list[RankState]:
    """Build the ranks of this process; weights that stages and pipelines share are made equal.

    Args:
        named: the blocks of the model; lazy ones are made here where they are needed.
        plan: of the pipeline.
        grid: all ranks.
        loss, optimizer: as of `penstock.runtime.pipeline.Pipeline`.

    Raises:
        ConfigError: blocks are not what the plan takes them for, or do not begin alike everywhere.
        CapabilityError: an optimizer cannot step a stage.
        TransportError: a peer is dead.
    """
    origin = time.perf_counter() if grid.group is None else common_origin(grid.control)
    here = [(key.pipeline, stage) for key in grid.local for stage in plan.schedule.on_rank(key.rank)]
    dealt = deal(named, plan.parts, here)
    stop = StopRequest()
    ranks = [
        RankState(key, plan, dealt[key.pipeline], loss, optimizer, Recorder(row, origin), stop, grid.tensor)
        for key, row in zip(grid.local, grid.global_ranks, strict=True)
    ]
    check_division(grid, (stage for state in ranks for stage in state.stages.values()))
    equalise(plan.ties, plan.schedule, grid, ranks)
    check_equal(plan.schedule, grid, ranks)
    return ranks


def blocks_here(plan: PipelinePlan, grid: RankGrid) -> list[str]:
    """Return the names of the blocks that this process trains."""
    stages = {stage.index for key in grid.local for stage in plan.schedule.on_rank(key.rank)}
    return [name for index in sorted(stages) for name in plan.parts[index]]
