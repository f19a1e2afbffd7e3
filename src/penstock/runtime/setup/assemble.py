"""Build the ranks of this process and their communicators."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from penstock.comm.collective.clock_sync import common_origin
from penstock.comm.core.rank_grid import RankGrid, backends
from penstock.comm.core.recorder import Recorder
from penstock.comm.p2p.nccl import LaneGroups, lane_groups
from penstock.comm.p2p.transport import Channel
from penstock.errors import CapabilityError
from penstock.partition.blocks import deal
from penstock.runtime.plan.plan import PipelinePlan
from penstock.runtime.setup.initial_weights import check_equal, check_same_plan, equalise
from penstock.runtime.setup.rank_state import RankState
from penstock.runtime.update.stop_request import StopRequest
from penstock.schedule.proof.check import Proof
from penstock.stage.loss import LossFunction
from penstock.stage.stage_runtime import StageRuntime
from penstock.weights.optim.updater import OptimizerFactory


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
    check_same_plan(plan, grid)
    here = [(key.pipeline, stage) for key in grid.local for stage in plan.schedule.on_rank(key.rank)]
    dealt = deal(named, plan.parts, here)
    stop = StopRequest()
    ranks = [
        RankState(key, plan, dealt[key.pipeline], loss, optimizer, Recorder(row, origin), stop)
        for key, row in zip(grid.local, grid.global_ranks, strict=True)
    ]
    equalise(plan.ties, plan.schedule, grid, ranks)
    check_equal(plan.schedule, grid, ranks)
    return ranks


def make_lane_groups(
    grid: RankGrid, stages: Iterable[StageRuntime], proofs: Mapping[Channel, Proof], ties: bool
) -> dict[Channel, list[LaneGroups]]:
    """Make the communicators for tensors, where they travel over NCCL.

    Raises:
        CapabilityError: something is wanted that is not offered there.
    """
    if grid.group is None or grid.control is None or not _needs_nccl(grid.group, stages):
        return {}
    if grid.width > 1:
        raise CapabilityError("parallel pipelines are offered over gloo so far, not over NCCL")
    if ties:
        raise CapabilityError("parameters that stages share are offered over gloo so far, not over NCCL")
    return {channel: lane_groups(proof.lowered.lanes, grid.control, "nccl") for channel, proof in proofs.items()}


def _needs_nccl(group: dist.ProcessGroup, stages: Iterable[StageRuntime]) -> bool:
    """Return whether tensors travel over NCCL: the group has it, and this rank does not compute on the CPU."""
    devices = {tensor.device.type for stage in stages for tensor in stage.module.state().values()}
    return backends(group).get("cuda") == "nccl" and "cpu" not in devices
