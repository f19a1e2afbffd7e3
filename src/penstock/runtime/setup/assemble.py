"""How a pipeline is put together: what does not go with what, the stages of this process, communicators."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.comm.collective.clock_sync import common_origin
from penstock.comm.core.rank_grid import RankGrid, backends
from penstock.comm.core.recorder import Recorder
from penstock.comm.p2p.nccl import LaneGroups, lane_groups
from penstock.comm.p2p.transport import Channel
from penstock.errors import CapabilityError, ConfigError
from penstock.partition.blocks import deal
from penstock.partition.tied import Tie
from penstock.runtime.rank.rank_state import RankState, Recipe
from penstock.runtime.setup.initial_weights import check_equal, equalise
from penstock.runtime.update.stop_request import StopRequest
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.combine import Combine
from penstock.schedule.proof.check import Proof
from penstock.stage.stage_runtime import StageRuntime


def check_combine(
    combine: Combine, schedule: Schedule, width: int, ties: Sequence[Tie], *, fast: bool, correction: str, delayed: bool
) -> None:
    """Make sure that parallel pipelines can agree in a way.

    Args:
        combine: the way.
        schedule: of each of them.
        width: how many they are.
        ties: what stages share.
        fast: sums are to be made by torch's all_reduce.
        correction: name of what is done about staleness.
        delayed: delays are chosen.

    Raises:
        ConfigError: they cannot.
    """
    if not isinstance(combine, Combine):
        raise ConfigError(f"combine must be a Combine, such as Combine('average', every=4); got {combine!r:.80}")
    fault = combine.fault(schedule, width, correction, tied=bool(ties), fast=fast, delayed=delayed)
    if fault is not None:
        raise ConfigError(fault)


def loss_constant(divisor: float, precision: torch.dtype | None) -> float:
    """c, which losses are divided by: in low precision a power of two, so that the gradient S / c is not rounded.

    Raises:
        ConfigError: it is not positive.
    """
    if not divisor > 0:
        raise ConfigError(f"divisor must be positive, got {divisor}")
    return float(divisor) if precision is None else 2.0 ** round(math.log2(divisor))


def make_workers(
    named: Mapping[str, Any],
    parts: Sequence[Sequence[str]],
    proof: Proof,
    grid: RankGrid,
    ties: Sequence[Tie],
    inside: Mapping[str, str],
    recipe: Recipe,
) -> list[RankState]:
    """The workers of this process; what stages and pipelines share is made equal.

    Args:
        named: the blocks of the model; lazy ones are made here where they are needed.
        parts: their names, by stage.
        proof: of the schedule.
        grid: all ranks.
        ties, inside: what stages share, and what blocks of one stage do.
        recipe: how the model is trained.
    """
    origin = time.perf_counter() if grid.group is None else common_origin(grid.control)
    here = [(key.pipeline, stage) for key in grid.local for stage in proof.schedule.on_rank(key.rank)]
    dealt = deal(named, parts, here)
    stop = StopRequest()
    ranks = [
        RankState(key, proof, dealt[key.pipeline], ties, inside, recipe, Recorder(row, origin), stop)
        for key, row in zip(grid.local, grid.global_ranks, strict=True)
    ]
    equalise(ties, proof.schedule, grid, ranks)
    check_equal(proof.schedule, grid, ranks)
    return ranks


def make_lane_groups(
    grid: RankGrid, stages: Iterable[StageRuntime], proofs: Mapping[Channel, Proof], ties: bool
) -> dict[Channel, list[LaneGroups]]:
    """Communicators for tensors, where they travel over NCCL.

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
    """Whether tensors travel over NCCL: it is there, and this rank does not compute on the CPU."""
    devices = {tensor.device.type for stage in stages for tensor in stage.module.state().values()}
    return backends(group).get("cuda") == "nccl" and "cpu" not in devices
